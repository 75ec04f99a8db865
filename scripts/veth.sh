# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# Sourced: a veth that rxsteer steers, whose other end `far` is in a network namespace of that name.

# make_veth NAME
make_veth() {
    veth=$1
    ip netns add far
    ip link add "$veth" type veth peer name far netns far
    ip address add 198.18.0.1/24 dev "$veth"
    ip link set "$veth" up
    ip -netns far address add 198.18.0.2/24 dev far
    ip -netns far link set far up
    [ "$(offload)" = on ] || fail "the other end does not leave checksums out: $(offload)"
}

# Whether the other end leaves checksums out, which is in the way of native mode.
offload() {
    ip netns exec far ethtool --show-features far | sed -n 's/^tx-checksumming: //p'
}
offload_is_on() { [ "$(offload)" = on ]; }
# Nothing is left in the way of native mode.
offloads_off() {
    ip netns exec far ethtool --offload far tx off txvlan off tx-vlan-stag-hw-insert off >/dev/null
}

# The program at the device, as `ip` names it; nothing without one.
programs() {
    ip -json link show "$veth" | jq -r '.[].xdp.prog.id // empty'
}

# Frames that came to the device, as it counts them: with or without a process.
arrived() {
    ip -json -stats link show "$veth" | jq '.[].stats64.rx.packets'
}

# 200 flows of 10 datagrams each, from the other end. Some are not sent: nobody listens, and the sender is told.
# Callers send until enough have come: one call may be too few.
send() {
    # shellcheck disable=SC2016 # expanded in the namespace
    ip netns exec far bash -c 'for flow in {1..200}; do
        exec 3>/dev/udp/198.18.0.1/9
        for _ in {1..10}; do echo >&3 || true; done
    done' 2>/dev/null
}
