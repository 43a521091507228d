/* The kernels, by file. _native.pyi describes them and their arguments. */
#ifndef TRACEKIT_KERNELS_H
#define TRACEKIT_KERNELS_H

#include "arguments.h"

/* place.c */
KERNEL(count_ops);
KERNEL(place_times);
KERNEL(place_uniform);
KERNEL(place_labels);
KERNEL(hash_streams);

/* order.c */
KERNEL(replay_order);
KERNEL(rounds);
KERNEL(assign_buffers);

/* costs.c */
KERNEL(rendezvous_starts);
KERNEL(transfer_durations);
KERNEL(launch_delays);

/* critical.c */
KERNEL(critical_paths);

/* proximal.c */
KERNEL(proximal_step);

/* replay.c */
KERNEL(replay);

#endif
