// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * types.bpf.c: never loaded. User space gets the types of types.h, busy_poll.h and native.h from
 * the BTF of this object only.
 */
#include "native/native.h"
#include "busy_poll.h"
#include "types.h"

struct shared_types {
	struct flow_key flow_key;
	struct flow_name flow_name;
	struct flow_secret flow_secret;
	struct rps_map rps_map;
	struct rps_sock_flow rps_sock_flow;
	struct rps_dev_flow rps_dev_flow;
	struct backlog backlog;
	struct backlog_flushed backlog_flushed;
	struct backlog_request backlog_request;
	struct queue_return queue_return;
	struct backlog_wait backlog_wait;
	struct softnet_way softnet_way;
	struct hop_hash hop_hash;
	struct poll_cpu poll_cpu;
	struct rx_queue rx_queue;
	struct cpu cpu;
	struct rx_config rx_config;
	struct rx_mixings rx_mixings;
	struct rx_trial rx_trial;
	struct rx_delivered rx_delivered;
	struct busy_poll busy_poll;
	struct rx_facts rx_facts;
	struct netns_known netns_known;
	enum netns_reach netns_reach;
	enum backlog_request_of backlog_request_of;
	enum backlog_closed backlog_closed;
	enum flow_inline flow_inline;
	enum flow_result flow_result;
	enum flow_option flow_option;
	enum rps_location rps_location;
	enum rx_policy rx_policy;
	enum rx_reason rx_reason;
	enum rx_verdict rx_verdict;
	enum rx_pressure rx_pressure;
	enum load_unit load_unit;
	enum wait_sample wait_sample;
	enum softirq_device softirq_device;
};
const struct shared_types shared_types = {};
