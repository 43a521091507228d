/*
 * Preloaded into a job and its launcher. WALL_CLOCK=backwards: the wall clock is in the year 2040 and goes back. DISK and
 * ROOM: what a process writes into files below the folder DISK finds room for ROOM bytes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define AROUND 4000000000

static long written;

int clock_gettime(clockid_t clock, struct timespec *at) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, at);
  if (code == 0 && clock == CLOCK_REALTIME && getenv("WALL_CLOCK")) {
    at->tv_sec = AROUND - at->tv_sec;
    at->tv_nsec = 999999999 - at->tv_nsec;
  }
  return code;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}

static int is_on_the_disk(int file) {
  char link[64], path[4096];
  const char *disk = getenv("DISK");
  if (!disk || !getenv("ROOM")) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path);
  return length > (ssize_t)strlen(disk) && strncmp(path, disk, strlen(disk)) == 0;
}

ssize_t write(int file, const void *data, size_t bytes) {
  ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
  if (!is_on_the_disk(file)) return real(file, data, bytes);
  long room = atol(getenv("ROOM")) - written;
  if (room <= 0) {
    errno = ENOSPC;
    return -1;
  }
  ssize_t count = real(file, data, (long)bytes < room ? bytes : (size_t)room);
  if (count > 0) written += count;
  return count;
}
