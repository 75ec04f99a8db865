/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The receiver. Frames of the one flow that is watched are numbered from 1; 0 is a frame of
 * another flow. A dropped frame leaves a gap, which is allowed; being overtaken is not.
 */

byte delivered = 0; /* the number of the flow's last frame that reached the stack */

inline deliver(frame)
{
	if
	:: frame > 0 ->
		assert(frame > delivered); /* the rule of order */
		delivered = frame
	:: else
	fi
}

/* A place that frames leave in the order in which they came. */
inline deliver_all(queue, frame)
{
	do
	:: nempty(queue) -> queue ? frame; deliver(frame)
	:: empty(queue) -> break
	od
}
