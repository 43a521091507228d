/*
 * Plays NCCL's part from many threads, for the sanitizers: includes the plugin, so that all of it is instrumented.
 *
 * Each of PAIRS communicators has a thread that enqueues collectives and one that ends their channels, newest first,
 * some of them after finalize. Meanwhile the main thread switches the mask with the step, makes and destroys further
 * communicators, and reads lanes while they are written. Ends with 1 where a slot it believed whole was not.
 */
#include "plugin.c"

enum { PAIRS = 4, COLLECTIVES = 2000, BATCH = 16 };

struct pair {
  pthread_mutex_t lock;
  pthread_cond_t filled;
  void *context;
  void *handle[BATCH];
  int waiting, over;
  unsigned channels;
};

static struct pair pairs[PAIRS];
static int nccl_reads; /* the word of NCCL that the plugin writes */

static void *enqueue(void *argument) {
  struct pair *pair = argument;
  for (unsigned sequence = 0; sequence < COLLECTIVES; sequence++) {
    struct event_description description = {.type = BIT(EVENT_COLLECTIVE)};
    description.collective.sequence = sequence;
    description.collective.function = sequence % 2 ? "AllReduce" : "AllGather";
    description.collective.count = sequence;
    description.collective.data_type = "ncclFloat32";
    void *handle;
    ncclProfiler_v6.start_event(pair->context, &handle, &description);
    ncclProfiler_v6.stop_event(handle);
    pthread_mutex_lock(&pair->lock);
    while (pair->waiting == BATCH) pthread_cond_wait(&pair->filled, &pair->lock);
    pair->handle[pair->waiting++] = handle;
    pthread_cond_signal(&pair->filled);
    pthread_mutex_unlock(&pair->lock);
  }
  ncclProfiler_v6.finalize(pair->context); /* channels are still to end */
  pthread_mutex_lock(&pair->lock);
  pair->over = 1;
  pthread_cond_signal(&pair->filled);
  pthread_mutex_unlock(&pair->lock);
  return NULL;
}

static void end_channels(struct pair *pair, void *parent) {
  for (int channel = 1; channel >= 0; channel--) {
    struct event_description description = {.type = BIT(EVENT_KERNEL_CHANNEL), .parent = parent};
    description.kernel_channel.channel = (uint8_t)channel;
    description.kernel_channel.gpu_ns = 1000;
    union state_arguments arguments = {.gpu_ns = 2000};
    void *handle;
    ncclProfiler_v6.start_event(pair->context, &handle, &description);
    ncclProfiler_v6.record_event_state(handle, STATE_KERNEL_CHANNEL_STOP, &arguments);
    ncclProfiler_v6.stop_event(handle);
    pair->channels++;
  }
}

static void *finish(void *argument) {
  struct pair *pair = argument;
  void *taken[BATCH];
  for (;;) {
    pthread_mutex_lock(&pair->lock);
    while (!pair->waiting && !pair->over) pthread_cond_wait(&pair->filled, &pair->lock);
    int count = pair->waiting;
    memcpy(taken, pair->handle, sizeof taken);
    pair->waiting = 0;
    pthread_cond_signal(&pair->filled);
    pthread_mutex_unlock(&pair->lock);
    if (!count) return NULL;
    while (count) end_channels(pair, taken[--count]);
  }
}

/* Read the oldest slots of each lane, which are the next to be overwritten, as the launcher does; the number of those
 * that were torn and believed. */
static int read_lanes(void) {
  struct ring *ring = atomic_load(&current);
  int wrong = 0;
  for (int number = 0; number < LANES; number++) {
    uint64_t written = atomic_load_explicit(&ring->lane[number].written, memory_order_acquire);
    uint64_t oldest = written > ring->slots_per_lane ? written - ring->slots_per_lane + 1 : 1;
    for (uint64_t sequence = oldest; sequence < oldest + 8 && sequence <= written; sequence++) {
      uint64_t at = (uint64_t)number * ring->slots_per_lane + ((sequence - 1) & (ring->slots_per_lane - 1));
      _Atomic uint64_t *word = ring->slot[at];
      if (atomic_load_explicit(&word[0], memory_order_acquire) != sequence) continue;
      uint64_t second = atomic_load_explicit(&word[4], memory_order_acquire);
      uint64_t first = atomic_load_explicit(&word[3], memory_order_acquire);
      uint64_t kind = atomic_load_explicit(&word[6], memory_order_acquire);
      uint64_t event = atomic_load_explicit(&word[7], memory_order_acquire) >> 32 & 0xff;
      if (atomic_load_explicit(&word[0], memory_order_acquire) != sequence) continue;
      wrong += (kind >> 8 & 0xff) != (uint64_t)number;
      if ((kind & 0xff) == ACTION_START && event == EVENT_COLLECTIVE) wrong += first != second;
    }
  }
  return wrong;
}

int main(void) {
  pthread_t thread[2 * PAIRS];
  int wrong = 0;
  for (int number = 0; number < PAIRS; number++) {
    struct pair *pair = &pairs[number];
    pthread_mutex_init(&pair->lock, NULL);
    pthread_cond_init(&pair->filled, NULL);
    ncclProfiler_v6.init(&pair->context, (uint64_t)number, &nccl_reads, "pair", 1, 2, 0, NULL);
    pthread_create(&thread[2 * number], NULL, enqueue, pair);
    pthread_create(&thread[2 * number + 1], NULL, finish, pair);
  }
  for (int number = 0; number < 300; number++) {
    void *context;
    tracekit_nccl_set_step(number, number % 3 ? DEFAULT_MASK : 0);
    ncclProfiler_v4.init(&context, &nccl_reads, NULL, 99, 1, 1, 0, NULL);
    ncclProfiler_v4.finalize(context);
    wrong += read_lanes();
  }
  tracekit_nccl_set_step(300, DEFAULT_MASK);
  for (int number = 0; number < 2 * PAIRS; number++) pthread_join(thread[number], NULL);
  for (int number = 0; number < PAIRS; number++) {
    if (pairs[number].channels != 2 * COLLECTIVES) wrong++;
  }
  printf("%d\n", wrong);
  return wrong != 0;
}
