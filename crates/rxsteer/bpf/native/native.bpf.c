// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * native.bpf.c: never loaded. User space gets the types of native.h through its BTF.
 */
#include "native.h"

const struct rx_facts rx_facts_type = {};
