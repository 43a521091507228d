/*
 * The ring file of one rank: header, lanes, communicators, names, slots. `reader.py` holds the same layout for numpy.
 *
 * Each thread that reports events has a lane, and only that thread writes the lane's slots, so no lock is needed. A slot
 * is eight words. The first one, the sequence number, is 0 while the others change: a reader that finds it unchanged
 * after reading has a whole slot. A lane's `written` keeps counting when slots are reused, so overwritten slots can be
 * counted.
 */
#ifndef TRACEKIT_NCCL_RING_H
#define TRACEKIT_NCCL_RING_H

#include <stdatomic.h>
#include <stdint.h>

#define RING_MAGIC 0x0a314c43434e4b54u /* "TKNCCL1\n" */

enum {
  RING_VERSION = 2,
  LANES = 32,
  COMMUNICATORS = 512,
  NAMES = 128, /* a power of two */
  NAME_BYTES = 24,
  SLOT_WORDS = 8,
  NO_COMMUNICATOR = 0xffff,
};

enum action { ACTION_START = 1, ACTION_STATE = 2, ACTION_STOP = 3 };

struct lane {
  _Atomic uint64_t written;
  _Atomic uint32_t taken;
  _Atomic uint32_t reserved; /* room for its slots is reserved on the disk */
  uint32_t unused[12];
};

struct communicator {
  _Atomic uint32_t ready;
  int32_t ranks;
  int32_t rank;
  uint32_t unused;
  uint64_t id;
  uint8_t padding[40];
};

struct name {
  _Atomic uint64_t pointer; /* in the process that wrote it */
  char text[NAME_BYTES];
};

struct ring {
  _Atomic uint64_t magic;
  uint32_t version;
  _Atomic uint32_t communicators;
  uint64_t slots_per_lane;
  int64_t process;
  _Atomic uint64_t dropped; /* events of threads that got no lane */
  uint64_t unused[27];
  struct lane lane[LANES];
  struct communicator communicator[COMMUNICATORS];
  struct name name[NAMES];
  uint8_t padding[1792];
  _Atomic uint64_t slot[][SLOT_WORDS];
};

_Static_assert(sizeof(struct lane) == 64 && sizeof(struct communicator) == 64 && sizeof(struct name) == 32, "entries");
_Static_assert(offsetof(struct ring, lane) == 256, "lanes");
_Static_assert(offsetof(struct ring, slot) == 40960, "slots begin on a page");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "words are written without a lock");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the reader takes words apart as little-endian");

#endif
