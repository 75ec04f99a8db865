/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * flow_headers.h: packet headers that the kernel's headers for user space lack, or have only in a
 * form that can't be read by words.
 */
#pragma once

#include <linux/types.h>

/* Not in the kernel's headers for user space, or not in those of all versions. */
#define FLOW_ETH_P_QINQ2 0x9100 /* 802.1ad before ETH_P_8021AD was assigned */
#define FLOW_ETH_P_TEB	 0x6558 /* an Ethernet frame */

/* struct ethhdr is packed, and therefore read by bytes. */
struct flow_ethernet {
	__be16 dest[3];
	__be16 source[3];
	__be16 type;
};

struct flow_vlan {
	__be16 tci;
	__be16 type;
};

struct flow_pppoe {
	__u8 version_type;
	__u8 code;
	__be16 session;
	__be16 length; /* of what follows, the PPP protocol included */
	__be16 protocol;
};

struct flow_ipv6_fragment {
	__u8 next;
	__u8 reserved;
	__be16 offset;
	__be32 id;
};

struct flow_gre {
	__be16 flags;
	__be16 type;
};

struct flow_vxlan {
	__u8 flags;
	__u8 reserved[3];
	__be32 vni;
};

struct flow_geneve {
	__u8 version_length;
	__u8 flags;
	__be16 type;
	__be32 vni;
};

struct flow_gtpu {
	__u8 flags;
	__u8 message;
	__be16 length; /* of what follows these eight bytes */
	__be32 teid;
};

struct flow_gtpu_options {
	__be16 sequence;
	__u8 npdu;
	__u8 next;
};
