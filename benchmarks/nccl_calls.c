/*
 * What a call of NCCL into the plugin costs: nanoseconds per call, the best of some rounds, one line per kind.
 * Includes the plugin; argv[1] is the number of threads that call at once, each into its own lane.
 */
#include "plugin.c"

enum { CALLS = 200000, ROUNDS = 7, MOST_THREADS = 16 };

static int nccl_reads;
static void *context;
static pthread_barrier_t together;

typedef void (*call)(void **handle);

static void collective(void **handle) {
  struct event_description description = {.type = BIT(EVENT_COLLECTIVE)};
  description.collective.function = "AllReduce";
  description.collective.count = 1024;
  description.collective.data_type = "ncclFloat32";
  description.collective.algorithm = "RING";
  description.collective.protocol = "SIMPLE";
  ncclProfiler_v6.start_event(context, handle, &description);
}

static void transfer(void **handle) {
  struct event_description description = {.type = BIT(EVENT_P2P)};
  description.p2p.function = "Send";
  description.p2p.data_type = "ncclFloat32";
  ncclProfiler_v6.start_event(context, handle, &description);
}

static void stopped(void **handle) { ncclProfiler_v6.stop_event(*handle); }

static void channel(void **handle) {
  struct event_description description = {.type = BIT(EVENT_KERNEL_CHANNEL), .parent = *handle};
  void *part;
  ncclProfiler_v6.start_event(context, &part, &description);
}

static void channel_ended(void **handle) {
  union state_arguments arguments = {.gpu_ns = 1};
  uint64_t part = ((uint64_t)(uintptr_t)*handle & ~0xfull) | EVENT_KERNEL_CHANNEL;
  ncclProfiler_v6.record_event_state((void *)(uintptr_t)part, STATE_KERNEL_CHANNEL_STOP, &arguments);
}

static void unasked(void **handle) {
  struct event_description description = {.type = BIT(EVENT_GROUP)};
  void *nothing;
  (void)handle;
  ncclProfiler_v6.start_event(context, &nothing, &description);
}

static const struct {
  const char *name;
  call call;
} kinds[] = {
    {"start of a collective", collective}, {"start of a transfer", transfer},       {"stop of either", stopped},
    {"start of a channel", channel},       {"GPU stop of a channel", channel_ended}, {"an event nobody asked for", unasked},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static double best[MOST_THREADS][KINDS];

static void *measure(void *argument) {
  double *own = argument;
  void *handle;
  collective(&handle);
  for (int kind = 0; kind < KINDS; kind++) {
    own[kind] = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
      void *own_handle = handle;
      pthread_barrier_wait(&together);
      int64_t began = now_ns();
      for (int number = 0; number < CALLS; number++) kinds[kind].call(&own_handle);
      double cost = (double)(now_ns() - began) / CALLS;
      if (cost < own[kind]) own[kind] = cost;
    }
  }
  return NULL;
}

int main(int count, char **arguments) {
  int threads = count > 1 ? atoi(arguments[1]) : 1;
  pthread_t thread[MOST_THREADS];
  if (threads < 1 || threads > MOST_THREADS) return 2;
  pthread_barrier_init(&together, NULL, (unsigned)threads);
  ncclProfiler_v6.init(&context, 1, &nccl_reads, "benchmark", 1, 2, 0, NULL);
  if (!context) return 1;
  for (int number = 0; number < threads; number++) pthread_create(&thread[number], NULL, measure, best[number]);
  for (int number = 0; number < threads; number++) pthread_join(thread[number], NULL);
  for (int kind = 0; kind < KINDS; kind++) {
    double worst = 0;
    for (int number = 0; number < threads; number++) {
      if (best[number][kind] > worst) worst = best[number][kind];
    }
    printf("%s\t%.1f\n", kinds[kind].name, worst);
  }
  return 0;
}
