/* The kernels, by file. _native.pyi describes them and their arguments. */
#ifndef TRACEKIT_KERNELS_H
#define TRACEKIT_KERNELS_H

#include "arguments.h"

/* Calls `EACH` with the name of every kernel: those of place.c, order.c, costs.c, critical.c, proximal.c, replay.c, rollout.c, host_work.c. */
#define KERNELS(EACH)                                                                            \
    EACH(gather_times) EACH(gather_labels) EACH(hash_streams)                                    \
    EACH(replay_order) EACH(rounds) EACH(assign_buffers)                                         \
    EACH(rendezvous_starts) EACH(transfer_durations) EACH(launch_delays)                         \
    EACH(critical_paths) EACH(proximal_step) EACH(replay) EACH(roll_out)               \
    EACH(divide_work)

#define DECLARE(name) KERNEL(name);
KERNELS(DECLARE)

#endif
