use crate::datapath::XdpMode;
pub struct Device {
    pub name: String,
    pub ifindex: u32,
    pub nr_rx_queues: u32,
    pub driver: Option<String>,
}
pub struct Objection {
    pub reason: String,
    pub remedy: String,
    pub fatal: bool,
}
impl Device {
    pub fn open(name: &str) -> anyhow::Result<Self> {
        let ifindex = std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex"))?
            .trim()
            .parse()?;
        let n = std::fs::read_dir(format!("/sys/class/net/{name}/queues"))?
            .filter(|e| {
                e.as_ref()
                    .unwrap()
                    .file_name()
                    .to_string_lossy()
                    .starts_with("rx-")
            })
            .count();
        Ok(Self {
            name: name.into(),
            ifindex,
            nr_rx_queues: n as u32,
            driver: None,
        })
    }
    pub fn objections(&self, _m: XdpMode) -> Vec<Objection> {
        vec![]
    }
    pub fn explain_attach_error(&self, e: &std::io::Error, _m: XdpMode) -> anyhow::Error {
        anyhow::anyhow!("{e}")
    }
}
