use rxsteer::datapath::*;
fn main() {
    let config = Config { backlog_limit: 1000, rps_flow_cnt: 4096, dry_run: false, tunnels: 0, secret: draw_secret().unwrap() };
    let mut d = Datapath::load(&config, &[DeviceConfig { ifindex: 1, nr_rx_queues: 2 }]).unwrap();
    println!("{} {} {}", d.nr_queues(), d.nr_cpus(), d.nr_tracepoints());
    d.make_backlog(0, 1).unwrap();
    println!("{:?}", d.attach(0, XdpMode::Generic));
    std::thread::sleep(std::time::Duration::from_secs(1));
    println!("home {}", d.bring_home(std::time::Duration::from_secs(2)).unwrap());
    let q = d.rx_queue(0).unwrap();
    println!("{} {}", q.nr_received, q.nr_inline);
}
