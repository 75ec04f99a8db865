// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * probe.bpf.c: key and hash of packets by flow.h in the kernel, for comparison with the native
 * build. Run by BPF_PROG_TEST_RUN alone, with `repeat`: each run takes the next frame of a batch.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_helpers.h>

#include "core/flow.h"

#define PROBE_BATCH	1024
#define PROBE_FRAME_MAX 1152

struct probe {
	/* By user space. */
	__u32 len; /* ETH_HLEN to PROBE_FRAME_MAX */
	__u8 frame[PROBE_FRAME_MAX];
	/* The result. */
	enum flow_result result;
	__u32 hash;
	struct flow_key key;
};

const volatile struct flow_secret flow_secret;
const volatile enum flow_option flow_options;

struct probe probes[PROBE_BATCH];
__u32 nr_probed; /* since user space set it to 0 */

/* Makes the packet that of the probe; false if the kernel refuses. */
static __always_inline bool probe_fill(struct xdp_md *ctx, struct probe *probe)
{
	__u32 len = probe->len;

	if (len < ETH_HLEN || len > PROBE_FRAME_MAX)
		return false;
	if (bpf_xdp_adjust_tail(ctx, (int)len - (int)bpf_xdp_get_buff_len(ctx)))
		return false;
	return !bpf_xdp_store_bytes(ctx, 0, probe->frame, len);
}

SEC("xdp.frags")
int flow_probe(struct xdp_md *ctx)
{
	__u32 at = nr_probed;
	enum flow_result result = FLOW_KEYED;
	const void *data, *data_end;
	struct flow_key key;
	struct probe *probe;

	if (at >= PROBE_BATCH)
		return XDP_ABORTED;
	probe = &probes[at];
	if (!probe_fill(ctx, probe))
		return XDP_ABORTED;
	data = (const void *)(long)ctx->data;
	data_end = (const void *)(long)ctx->data_end;
	/* As in rx.bpf.c. */
	if (!flow_plain(data, data_end, data_end - data, flow_options, &key)) {
		key = (struct flow_key){};
		result = flow_follow(data, data_end, bpf_xdp_get_buff_len(ctx), flow_options, &key);
	}
	probe->result = result;
	probe->key = key;
	probe->hash = flow_hash(&key, &flow_secret);
	nr_probed = at + 1;
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
