// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * fuzz/flow.c: libFuzzer target of the packet parser (bpf/core/flow.h).
 *
 * An input has four bytes of parameters, then the packet. The parameters are
 * the tunnels to parse, the length after truncation, the linear length (both in
 * 256ths), and whether to pad to a jumbo frame. tests/native/fuzz.rs builds and runs it.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../bpf/core/flow.h"

#define JUMBO 9216

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "flow.c:%d: %s\n", __LINE__, #condition);                  \
			abort();                                                                   \
		}                                                                                  \
	} while (0)

struct run {
	enum flow_result result;
	struct flow_key key;
};

/* Parses a copy that ends with the linear part, so that ASan detects reads beyond it. */
static struct run parse(const uint8_t *packet, uint32_t linear, uint32_t len, uint32_t tunnels)
{
	uint8_t *copy = malloc(linear ? linear : 1);
	struct run fast, run;

	CHECK(copy);
	memcpy(copy, packet, linear);

	memset(&run, 0x5a, sizeof(run));
	run.result = flow_parse(copy, copy + linear, len, tunnels, &run.key);
	CHECK(run.result < NR_FLOW_RESULTS);

	/* The fast path has the same result as the general one. */
	memset(&fast, 0xa5, sizeof(fast));
	fast.result = flow_follow(copy, copy + linear, len, tunnels, &fast.key);
	CHECK(fast.result == run.result);
	if (run.result == FLOW_KEYED) {
		/* every byte of the key is written */
		CHECK(!memcmp(&fast.key, &run.key, sizeof(run.key)));
	} else {
		/* no byte is written */
		for (size_t i = 0; i < sizeof(run.key); i++)
			CHECK(((uint8_t *)&run.key)[i] == 0x5a);
	}
	CHECK(!memcmp(copy, packet, linear));
	free(copy);
	return run;
}

static int has_ports(uint32_t proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_UDPLITE ||
	       proto == IPPROTO_SCTP || proto == IPPROTO_DCCP;
}

/* Invariants of a key for any packet. */
static void check_key(const struct flow_key *key)
{
	static const uint8_t none[sizeof(key->daddr)];
	int without_daddr = !memcmp(key->daddr, none, sizeof(none));

	CHECK(key->proto <= 0xff);
	if (key->ports && !has_ports(key->proto))
		CHECK(key->proto == IPPROTO_ESP || key->proto == IPPROTO_AH);
	if (has_ports(key->proto) && !without_daddr)
		CHECK(!key->ports); /* a fragment */
}

/* A truncated packet has the same result, or FLOW_TRUNCATED. */
static void check_less(const struct run *whole, const struct run *less)
{
	if (less->result == FLOW_TRUNCATED)
		return;
	CHECK(less->result == whole->result);
	if (whole->result == FLOW_KEYED)
		CHECK(!memcmp(&less->key, &whole->key, sizeof(whole->key)));
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
	static uint8_t packet[JUMBO];
	struct run whole, less, plain;
	uint32_t tunnels, len, cut, linear;

	if (size < 4 || size - 4 > JUMBO)
		return 0;
	len = size - 4;
	memset(packet, 0xb7, sizeof(packet));
	memcpy(packet, input + 4, len);
	tunnels = input[0] & 0x1f;
	if (input[3] & 1)
		len = JUMBO;
	cut = len * input[1] / 256;
	linear = len * input[2] / 256;

	whole = parse(packet, len, len, tunnels);
	if (whole.result == FLOW_KEYED)
		check_key(&whole.key);

	less = parse(packet, cut, cut, tunnels); /* the frame ends early */
	check_less(&whole, &less);
	less = parse(packet, linear, len, tunnels); /* only its linear part ends early */
	check_less(&whole, &less);

	/* Tunnels affect only packets that have a key without them. */
	plain = parse(packet, len, len, 0);
	if (plain.result != FLOW_KEYED)
		CHECK(whole.result == plain.result);
	return 0;
}
