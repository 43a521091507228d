/*
 * The interface between NCCL and a profiler plugin, as far as this plugin reads it.
 *
 * NCCL looks the tables up by name (`ncclProfiler_v4` ... `ncclProfiler_v7`), newest first. Versions 4 to 7 put the
 * fields below at the same offsets: version 5 widened `type` from one byte to eight, into what had been padding, and
 * later versions only append. So one description serves all of them, and the assertions hold it to the layout.
 */
#ifndef TRACEKIT_NCCL_ABI_H
#define TRACEKIT_NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { RESULT_SUCCESS = 0 };

/* Numbers of the event types. NCCL passes 1 << number, and masks consist of these. */
enum event_number {
  EVENT_GROUP = 0,
  EVENT_COLLECTIVE = 1,
  EVENT_P2P = 2,
  EVENT_PROXY_OP = 3,
  EVENT_PROXY_STEP = 4,
  EVENT_PROXY_CONTROL = 5,
  EVENT_KERNEL_CHANNEL = 6,
  EVENT_NET_PLUGIN = 7,
  EVENT_NUMBERS = 16,
};

enum { STATE_KERNEL_CHANNEL_STOP = 22 };

/* Levels and subsystem of the logger that NCCL passes to `init`. */
enum { LOG_WARN = 2, LOG_INFO = 3 };
enum { LOG_SUBSYSTEM_INIT = 1 };
typedef void (*log_function)(int level, unsigned long flags, const char *where, int line, const char *format, ...);

struct collective_description {
  uint64_t sequence; /* counted per communicator and function */
  const char *function;
  const void *send_buffer;
  void *receive_buffer;
  size_t count;
  int root;
  const char *data_type;
  uint8_t channels;
  uint8_t warps;
  const char *algorithm;
  const char *protocol;
};

struct p2p_description {
  const char *function;
  void *buffer;
  const char *data_type;
  size_t count;
  int peer;
  uint8_t channels;
};

struct proxy_op_description {
  pid_t process; /* the process that context and parent point into; with PXN, another one */
  uint8_t channel;
  int peer;
  int steps;
  int chunk_bytes;
  int is_send;
};

struct kernel_channel_description {
  uint8_t channel;
  uint64_t gpu_ns;
};

struct event_description {
  uint64_t type; /* version 4 sets the first byte only */
  void *parent;
  int rank;
  union {
    struct collective_description collective;
    struct p2p_description p2p;
    struct proxy_op_description proxy_op;
    int proxy_step;
    struct kernel_channel_description kernel_channel;
  };
};

union state_arguments {
  size_t transferred_bytes;
  uint64_t gpu_ns;
};

struct profiler_v4 {
  const char *name;
  int (*init)(void **context, int *mask, const char *communicator_name, uint64_t communicator_id, int nodes, int ranks,
              int rank, log_function log);
  int (*start_event)(void *context, void **handle, struct event_description *description);
  int (*stop_event)(void *handle);
  int (*record_event_state)(void *handle, int state, union state_arguments *arguments);
  int (*finalize)(void *context);
};

struct profiler_v5 {
  const char *name;
  int (*init)(void **context, uint64_t communicator_id, int *mask, const char *communicator_name, int nodes, int ranks,
              int rank, log_function log);
  int (*start_event)(void *context, void **handle, struct event_description *description);
  int (*stop_event)(void *handle);
  int (*record_event_state)(void *handle, int state, union state_arguments *arguments);
  int (*finalize)(void *context);
};

_Static_assert(sizeof(void *) == 8, "NCCL runs on 64-bit machines only");
_Static_assert(offsetof(struct event_description, parent) == 8, "parent");
_Static_assert(offsetof(struct event_description, rank) == 16, "rank");
_Static_assert(offsetof(struct event_description, collective.sequence) == 24, "collective.sequence");
_Static_assert(offsetof(struct event_description, collective.function) == 32, "collective.function");
_Static_assert(offsetof(struct event_description, collective.count) == 56, "collective.count");
_Static_assert(offsetof(struct event_description, collective.root) == 64, "collective.root");
_Static_assert(offsetof(struct event_description, collective.data_type) == 72, "collective.data_type");
_Static_assert(offsetof(struct event_description, collective.channels) == 80, "collective.channels");
_Static_assert(offsetof(struct event_description, collective.warps) == 81, "collective.warps");
_Static_assert(offsetof(struct event_description, collective.algorithm) == 88, "collective.algorithm");
_Static_assert(offsetof(struct event_description, collective.protocol) == 96, "collective.protocol");
_Static_assert(offsetof(struct event_description, p2p.function) == 24, "p2p.function");
_Static_assert(offsetof(struct event_description, p2p.data_type) == 40, "p2p.data_type");
_Static_assert(offsetof(struct event_description, p2p.count) == 48, "p2p.count");
_Static_assert(offsetof(struct event_description, p2p.peer) == 56, "p2p.peer");
_Static_assert(offsetof(struct event_description, p2p.channels) == 60, "p2p.channels");
_Static_assert(offsetof(struct event_description, proxy_op.process) == 24, "proxy_op.process");
_Static_assert(offsetof(struct event_description, proxy_op.channel) == 28, "proxy_op.channel");
_Static_assert(offsetof(struct event_description, proxy_op.peer) == 32, "proxy_op.peer");
_Static_assert(offsetof(struct event_description, proxy_op.steps) == 36, "proxy_op.steps");
_Static_assert(offsetof(struct event_description, proxy_op.chunk_bytes) == 40, "proxy_op.chunk_bytes");
_Static_assert(offsetof(struct event_description, proxy_op.is_send) == 44, "proxy_op.is_send");
_Static_assert(offsetof(struct event_description, proxy_step) == 24, "proxy_step");
_Static_assert(offsetof(struct event_description, kernel_channel.channel) == 24, "kernel_channel.channel");
_Static_assert(offsetof(struct event_description, kernel_channel.gpu_ns) == 32, "kernel_channel.gpu_ns");
_Static_assert(sizeof(struct profiler_v5) == 48, "table of functions");

#endif
