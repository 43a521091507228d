/*
 * The profiler plugin that NCCL loads: writes what NCCL reports into the ring file of this rank.
 *
 * In: calls by NCCL through the tables at the end, from user threads, proxy threads and CUDA's callback threads; the
 * step and mask that Python sets. Out: slots in the ring of `ring.h`. Every call adds one slot and changes no earlier
 * one, so calls may come late, never or in any order: `rings.py` joins them by handle. A handle is a number, not a
 * pointer, so it cannot be used after it was freed.
 *
 * While the job runs, nothing here waits or allocates, except for reserving a lane's room when a thread takes it. Only
 * `init` takes a lock and creates the file. A failure costs events, never the communicator.
 */
#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "ring.h"

#define EXPORT __attribute__((visibility("default")))
#define BIT(number) (1u << (number))

enum { DEFAULT_MASK = BIT(EVENT_COLLECTIVE) | BIT(EVENT_P2P) | BIT(EVENT_KERNEL_CHANNEL) };
enum { OPERATIONS = BIT(EVENT_COLLECTIVE) | BIT(EVENT_P2P) };
enum { DEFAULT_SLOTS = 1 << 14, LEAST_SLOTS = 1 << 4, MOST_SLOTS = 1 << 22 };

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static pthread_key_t leaving; /* returns a lane when its thread ends */
static pthread_once_t leaving_once = PTHREAD_ONCE_INIT;
static _Atomic(struct ring *) current;
static _Atomic(int *) nccl_mask; /* NCCL reads it again before each operation */
static int alive;                /* number of communicators, guarded by `opening` */
static _Atomic int ring_file = -1;
static _Atomic int is_full; /* the disk is full */
static _Atomic uint32_t wanted;
static _Atomic int32_t step = -1;

static _Thread_local struct lane *own_lane;
static _Thread_local struct ring *own_ring; /* a forked child has a ring of its own */

/* ---- mask and step ----------------------------------------------------------------------------------------------- */

/* A channel or a proxy op is useless without the operation that it belongs to. */
static uint32_t with_parents(uint32_t mask) {
  if (mask & BIT(EVENT_PROXY_STEP)) mask |= BIT(EVENT_PROXY_OP);
  if (mask & (BIT(EVENT_PROXY_OP) | BIT(EVENT_KERNEL_CHANNEL))) mask |= OPERATIONS;
  return mask;
}

__attribute__((constructor)) static void read_environment(void) {
  const char *text = getenv("TRACEKIT_NCCL_MASK");
  atomic_store(&wanted, with_parents(text ? (uint32_t)strtoul(text, NULL, 0) : DEFAULT_MASK));
}

/* Python calls this when a step begins. With `mask` 0, nothing in the step is recorded. */
EXPORT void tracekit_nccl_set_step(int32_t number, uint32_t mask) {
  atomic_store(&step, number);
  atomic_store(&wanted, with_parents(mask));
  int *heard = atomic_load(&nccl_mask);
  if (heard) __atomic_store_n(heard, (int)with_parents(mask), __ATOMIC_RELAXED);
}

/* ---- the ring ---------------------------------------------------------------------------------------------------- */

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static uint64_t slots_per_lane(void) {
  const char *text = getenv("TRACEKIT_NCCL_SLOTS");
  uint64_t asked = text ? strtoull(text, NULL, 0) : DEFAULT_SLOTS, slots = LEAST_SLOTS;
  while (slots < asked && slots < MOST_SLOTS) slots *= 2;
  return slots;
}

static int ring_path(char *path, size_t size) {
  const char *directory = getenv("TRACEKIT_COLLECT_DIR"), *attempt = getenv("TORCHELASTIC_RESTART_COUNT");
  char host[65] = "";
  if (!directory) return ENOENT;
  gethostname(host, sizeof host - 1);
  int length = snprintf(path, size, "%s/attempt-%03ld", directory, attempt ? strtol(attempt, NULL, 10) : 0L);
  if (length < 0 || (size_t)length >= size) return ENAMETOOLONG;
  if (mkdir(path, 0777) && errno != EEXIST) return errno;
  struct stat found;
  if (lstat(path, &found)) return errno;
  if (!S_ISDIR(found.st_mode)) return ENOTDIR; /* a link that another user put there */
  int more = snprintf(path + length, size - (size_t)length, "/nccl-%s-%ld.ring", host, (long)getpid());
  return more < 0 || (size_t)(length + more) >= size ? ENAMETOOLONG : 0;
}

/* Reserve room on the disk before writing: writing to a page of a sparse file on a full disk would kill the job. */
static int map_ring(const char *path, size_t bytes, struct ring **ring) {
  int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return errno;
  int error = posix_fallocate(file, 0, sizeof **ring);
  if (!error && ftruncate(file, (off_t)bytes)) error = errno;
  void *mapped = error ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (!error && mapped == MAP_FAILED) error = errno;
  if (error) {
    close(file);
    unlink(path);
    return error;
  }
  *ring = mapped;
  atomic_store(&ring_file, file); /* a parent's file stays open: the parent goes on writing */
  return 0;
}

static int reserve_lane(struct ring *ring, uint64_t number) {
  if (atomic_load(&ring->lane[number].reserved)) return 1;
  uint64_t bytes = ring->slots_per_lane * sizeof ring->slot[0];
  if (posix_fallocate(atomic_load(&ring_file), (off_t)(sizeof *ring + number * bytes), (off_t)bytes)) return 0;
  atomic_store(&ring->lane[number].reserved, 1);
  return 1;
}

static struct ring *open_ring(log_function log) {
  char path[4096] = "";
  struct ring *ring = NULL;
  uint64_t slots = slots_per_lane();
  int error = ring_path(path, sizeof path);
  if (!error) error = map_ring(path, sizeof *ring + LANES * slots * SLOT_WORDS * sizeof(uint64_t), &ring);
  if (error) {
    if (log) log(LOG_WARN, ~0ul, __FILE__, __LINE__, "tracekit: no NCCL events: %s: %s", path, strerror(error));
    return NULL;
  }
  ring->version = RING_VERSION;
  ring->slots_per_lane = slots;
  ring->process = getpid();
  atomic_store(&is_full, 0);
  atomic_store_explicit(&ring->magic, RING_MAGIC, memory_order_release); /* who finds it finds a whole header */
  if (log) log(LOG_INFO, LOG_SUBSYSTEM_INIT, __FILE__, __LINE__, "tracekit: NCCL events go to %s", path);
  return ring;
}

static void leave_lane(void *lane) {
  own_lane = NULL;
  atomic_store_explicit(&((struct lane *)lane)->taken, 0, memory_order_release);
}

static void make_key(void) { pthread_key_create(&leaving, leave_lane); }

/* A lane for this thread, NULL if all are taken or the disk is full. */
static struct lane *take_lane(struct ring *ring) {
  for (uint64_t number = 0; number < LANES && !atomic_load(&is_full); number++) {
    struct lane *lane = &ring->lane[number];
    uint32_t taken = atomic_load_explicit(&lane->taken, memory_order_relaxed);
    if (taken || !atomic_compare_exchange_strong(&lane->taken, &taken, 1)) continue;
    if (!reserve_lane(ring, number)) {
      atomic_store(&is_full, 1);
      break;
    }
    own_ring = ring;
    own_lane = lane;
    pthread_setspecific(leaving, own_lane);
    return own_lane;
  }
  atomic_fetch_add(&ring->dropped, 1);
  return NULL;
}

struct slot {
  uint64_t handle, first, second; /* handle 0: the slot's own, for a start */
  int32_t peer;
  uint8_t action, number, channel, warps, function, data_type, algorithm, protocol, flags;
  uint16_t communicator, state;
};

static uint64_t handle_of(uint64_t sequence, uint64_t lane, unsigned number) {
  return sequence << 16 | lane << 8 | 0x80 | number;
}
static uint64_t sequence_of(uint64_t handle) { return handle >> 16; }
static unsigned number_of(uint64_t handle) { return handle & 0x0f; }

static void put(_Atomic uint64_t *word, uint64_t value) {
  atomic_store_explicit(word, value, memory_order_release); /* after the sequence number has become 0 */
}

/* Write one slot. Returns its handle; the handle has sequence 0 if the event was dropped. */
static uint64_t push(struct ring *ring, const struct slot *from) {
  struct lane *lane = own_lane && own_ring == ring ? own_lane : take_lane(ring);
  if (!lane) return handle_of(0, 0, from->number);
  uint64_t written = atomic_load_explicit(&lane->written, memory_order_relaxed);
  uint64_t number = (uint64_t)(lane - ring->lane);
  uint64_t at = number * ring->slots_per_lane + (written & (ring->slots_per_lane - 1));
  _Atomic uint64_t *word = ring->slot[at];
  uint64_t handle = from->handle ? from->handle : handle_of(written + 1, number, from->number);
  uint32_t in_step = (uint32_t)atomic_load_explicit(&step, memory_order_relaxed);
  atomic_store_explicit(&word[0], 0, memory_order_relaxed);
  put(&word[1], (uint64_t)now_ns());
  put(&word[2], handle);
  put(&word[3], from->first);
  put(&word[4], from->second);
  put(&word[5], in_step | (uint64_t)(uint32_t)from->peer << 32);
  put(&word[6], from->action | number << 8 | (uint64_t)from->channel << 16 | (uint64_t)from->warps << 24 |
                    (uint64_t)from->communicator << 32 | (uint64_t)from->state << 48);
  put(&word[7], from->function | (uint64_t)from->data_type << 8 | (uint64_t)from->algorithm << 16 |
                    (uint64_t)from->protocol << 24 | (uint64_t)from->number << 32 | (uint64_t)from->flags << 40);
  put(&word[0], written + 1);
  put(&lane->written, written + 1);
  return handle;
}

/* ---- names ------------------------------------------------------------------------------------------------------- */

/* The number of a name that NCCL uses, found by its address and checked by its text; 0 if none is left. Two threads
 * that meet a new name at the same time may give it two numbers. */
static uint8_t name_number(struct ring *ring, const char *text) {
  if (!text) return 0;
  uint64_t pointer = (uint64_t)(uintptr_t)text, at = pointer >> 3 ^ pointer >> 9;
  for (unsigned tried = 0; tried < NAMES; tried++) {
    unsigned number = (at + tried) & (NAMES - 1);
    if (!number) continue;
    struct name *name = &ring->name[number];
    uint64_t found = atomic_load_explicit(&name->pointer, memory_order_acquire);
    if (found == pointer && !strncmp(name->text, text, NAME_BYTES - 1)) return (uint8_t)number;
    if (found) continue;
    if (atomic_compare_exchange_strong(&name->pointer, &found, 1)) { /* 1: not an address; the text follows */
      strncpy(name->text, text, NAME_BYTES - 1);
      atomic_store_explicit(&name->pointer, pointer, memory_order_release);
      return (uint8_t)number;
    }
  }
  return 0;
}

/* ---- what NCCL calls --------------------------------------------------------------------------------------------- */

static int init_v5(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank,
                   log_function log) {
  (void)name, (void)nodes;
  pthread_once(&leaving_once, make_key);
  pthread_mutex_lock(&opening);
  struct ring *ring = atomic_load(&current);
  if (!ring || ring->process != getpid()) atomic_store(&current, ring = open_ring(log));
  *context = NULL;
  *mask = 0;
  if (ring) {
    uint32_t index = atomic_load(&ring->communicators);
    if (index < COMMUNICATORS) {
      struct communicator *made = &ring->communicator[index];
      made->id = id;
      made->ranks = ranks;
      made->rank = rank;
      atomic_store_explicit(&made->ready, 1, memory_order_release);
    } else {
      index = NO_COMMUNICATOR;
    }
    atomic_fetch_add(&ring->communicators, 1);
    alive++;
    *context = (void *)(uintptr_t)(index + 1);
    *mask = (int)atomic_load(&wanted);
    atomic_store(&nccl_mask, mask);
  }
  pthread_mutex_unlock(&opening);
  return RESULT_SUCCESS;
}

static int init_v4(void **context, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank,
                   log_function log) {
  return init_v5(context, id, mask, name, nodes, ranks, rank, log);
}

/* Fill in what NCCL says about the event. Returns 0 if the event is not recorded. */
static int describe(struct ring *ring, const struct event_description *from, struct slot *to) {
  uint64_t parent = (uint64_t)(uintptr_t)from->parent;
  int asked = (atomic_load_explicit(&wanted, memory_order_relaxed) & BIT(to->number)) != 0;
  switch (to->number) {
  case EVENT_COLLECTIVE:
    to->first = from->collective.count;
    to->second = from->collective.sequence;
    to->peer = from->collective.root;
    to->function = name_number(ring, from->collective.function);
    to->data_type = name_number(ring, from->collective.data_type);
    to->channel = from->collective.channels;
    to->warps = from->collective.warps;
    to->algorithm = name_number(ring, from->collective.algorithm);
    to->protocol = name_number(ring, from->collective.protocol);
    return asked;
  case EVENT_P2P:
    to->first = from->p2p.count;
    to->peer = from->p2p.peer;
    to->channel = from->p2p.channels;
    to->function = name_number(ring, from->p2p.function);
    to->data_type = name_number(ring, from->p2p.data_type);
    return asked;
  case EVENT_KERNEL_CHANNEL: /* comes late: what counts is whether its operation was recorded */
    to->first = parent;
    to->second = from->kernel_channel.gpu_ns;
    to->channel = from->kernel_channel.channel;
    return sequence_of(parent) != 0;
  case EVENT_PROXY_OP:
    if (from->proxy_op.process != ring->process) { /* its pointers belong to another process */
      parent = 0;
      to->communicator = NO_COMMUNICATOR;
    }
    to->first = parent;
    to->second = (uint64_t)(uint32_t)from->proxy_op.steps << 32 | (uint32_t)from->proxy_op.chunk_bytes;
    to->peer = from->proxy_op.peer;
    to->channel = from->proxy_op.channel;
    to->flags = from->proxy_op.is_send != 0;
    return asked;
  case EVENT_PROXY_STEP:
    to->first = parent;
    to->second = (uint64_t)(uint32_t)from->proxy_step;
    return asked && sequence_of(parent) != 0;
  default: return 0;
  }
}

static int start(void *context, void **handle, struct event_description *from, uint64_t type) {
  struct ring *ring = atomic_load_explicit(&current, memory_order_acquire);
  *handle = NULL;
  if (!ring || !type || type >> EVENT_NUMBERS || type & (type - 1)) return RESULT_SUCCESS;
  uintptr_t index = (uintptr_t)context;
  struct slot slot = {.action = ACTION_START, .number = (uint8_t)__builtin_ctzll(type), .peer = -1};
  slot.communicator = index && index <= COMMUNICATORS ? (uint16_t)(index - 1) : NO_COMMUNICATOR;
  int recorded = describe(ring, from, &slot);
  *handle = (void *)(uintptr_t)(recorded ? push(ring, &slot) : handle_of(0, 0, slot.number));
  return RESULT_SUCCESS;
}

static int start_v4(void *context, void **handle, struct event_description *from) {
  return start(context, handle, from, from->type & 0xff);
}
static int start_v5(void *context, void **handle, struct event_description *from) {
  return start(context, handle, from, from->type);
}

static int record_state(void *tag, int state, union state_arguments *arguments) {
  uint64_t handle = (uint64_t)(uintptr_t)tag;
  struct ring *ring = atomic_load_explicit(&current, memory_order_acquire);
  int is_channel = number_of(handle) == EVENT_KERNEL_CHANNEL;
  if (!ring || !sequence_of(handle)) return RESULT_SUCCESS;
  if (is_channel && (state != STATE_KERNEL_CHANNEL_STOP || !arguments)) return RESULT_SUCCESS;
  struct slot slot = {.action = ACTION_STATE, .number = (uint8_t)number_of(handle), .handle = handle, .peer = -1};
  slot.communicator = NO_COMMUNICATOR;
  slot.state = (uint16_t)state;
  if (arguments) slot.first = is_channel ? arguments->gpu_ns : arguments->transferred_bytes;
  push(ring, &slot);
  return RESULT_SUCCESS;
}

/* A channel ends with its last state; an operation's stop means that it has been enqueued. */
static int stop(void *tag) {
  uint64_t handle = (uint64_t)(uintptr_t)tag;
  struct ring *ring = atomic_load_explicit(&current, memory_order_acquire);
  if (!ring || !sequence_of(handle) || number_of(handle) == EVENT_KERNEL_CHANNEL) return RESULT_SUCCESS;
  struct slot slot = {.action = ACTION_STOP, .number = (uint8_t)number_of(handle), .handle = handle, .peer = -1};
  slot.communicator = NO_COMMUNICATOR;
  push(ring, &slot);
  return RESULT_SUCCESS;
}

/* The ring stays mapped, because stops may still come. */
static int finalize(void *context) {
  if (!context) return RESULT_SUCCESS;
  pthread_mutex_lock(&opening);
  if (alive > 0 && --alive == 0) atomic_store(&nccl_mask, NULL);
  pthread_mutex_unlock(&opening);
  return RESULT_SUCCESS;
}

EXPORT struct profiler_v4 ncclProfiler_v4 = {"tracekit", init_v4, start_v4, stop, record_state, finalize};
EXPORT struct profiler_v5 ncclProfiler_v5 = {"tracekit", init_v5, start_v5, stop, record_state, finalize};
EXPORT struct profiler_v5 ncclProfiler_v6 = {"tracekit", init_v5, start_v5, stop, record_state, finalize};
EXPORT struct profiler_v5 ncclProfiler_v7 = {"tracekit", init_v5, start_v5, stop, record_state, finalize};
