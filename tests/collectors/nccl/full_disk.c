/*
 * A disk that fills up while the job runs: two threads report, and there is no more room when the second one first does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>

static int is_out_of_room;

static int reserve(int file, off_t begin, off_t bytes) {
  return is_out_of_room ? ENOSPC : posix_fallocate(file, begin, bytes);
}

#define posix_fallocate reserve
#include "plugin.c"

static void *context;

static void *collective(void *sequence) {
  struct event_description description = {.type = BIT(EVENT_COLLECTIVE)};
  description.collective.sequence = (uint64_t)(uintptr_t)sequence;
  void *handle;
  ncclProfiler_v6.start_event(context, &handle, &description);
  ncclProfiler_v6.stop_event(handle);
  return handle;
}

int main(void) {
  int nccl_reads;
  pthread_t late;
  ncclProfiler_v6.init(&context, 1, &nccl_reads, NULL, 1, 2, 0, NULL);
  collective((void *)0);
  is_out_of_room = 1;
  pthread_create(&late, NULL, collective, (void *)1);
  pthread_join(late, NULL);
  collective((void *)2);
  return 0;
}
