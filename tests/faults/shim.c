/*
 * Preloaded into a process, this counts its file operations below one folder, and does something to the n-th one.
 *
 * Steered by arm(), or by the environment variable FAULTS="NTH WHAT ERRNO STICKY GROUPS LOG ROOT":
 *   NTH     which operation, from 1; 0: none
 *   WHAT    what happens to it, `enum what`
 *   ERRNO   with which it fails
 *   STICKY  1: it happens to every later one, too, as on a disk that is gone
 *   GROUPS  which operations count, `enum group`
 *   LOG     a descriptor that gets a line for each operation that is hit, or without NTH for each that counts: its name
 *           and its paths, by tabs; -1: none
 *   ROOT    the folder, absolute and without links
 *
 * A descriptor is below ROOT if the kernel says so now, wherever it comes from. Not seen: stdio's own calls (fopen and
 * what follows), memory that is mapped to be written, io_uring, and whoever makes system calls without the C library.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum what { FAIL, SHORTEN, TEAR, KILL }; /* TEAR: half of a write, then SIGKILL; KILL: SIGKILL before the operation */
/* SPACE: what else a full disk refuses; LOOK: opening to read, status, lists. */
enum group { WRITE = 1, SPACE = 2, CHANGE = 4, READ = 8, LOOK = 16, LOCK = 32 };

#define WHOLE ((size_t)-1)
#define LONGEST (2 * PATH_MAX)

static struct {
    long nth;
    int what, error, sticky, groups, log;
    size_t root_length;
    char root[PATH_MAX];
} plan = {.log = -1};
static atomic_long count;

void arm(long nth, int what, int error, int sticky, int groups, int log, const char *root) {
    plan.root_length = 0; /* nothing counts meanwhile */
    plan.nth = nth, plan.what = what, plan.error = error, plan.sticky = sticky, plan.groups = groups, plan.log = log;
    snprintf(plan.root, sizeof plan.root, "%s", root);
    count = 0;
    plan.root_length = strlen(plan.root);
}

long counted(void) { return count; }

__attribute__((constructor)) static void from_environment(void) {
    long nth;
    int what, error, sticky, groups, log, end = 0;
    const char *text = getenv("FAULTS");
    if (text && sscanf(text, "%ld %d %d %d %d %d %n", &nth, &what, &error, &sticky, &groups, &log, &end) == 6 && end)
        arm(nth, what, error, sticky, groups, log, text + end);
}

/* ---- where an operation is */

static void path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

static void path_at(int fd, const char *name, char *path) {
    int end = 0;
    if (sscanf(name, "/proc/self/fd/%d/%n", &fd, &end) == 1 && end)
        name += end; /* a name in the folder of that descriptor */
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    if (fd == AT_FDCWD) {
        long length = syscall(SYS_getcwd, path, PATH_MAX);
        path[length < 0 ? 0 : length] = 0;
    } else
        path_of(fd, path);
    size_t length = strlen(path);
    if (name[0]) snprintf(path + length, PATH_MAX - length, "/%s", name);
}

static int below(const char *path) {
    size_t length = plan.root_length;
    return length && !strncmp(path, plan.root, length) && (!path[length] || path[length] == '/');
}

/* ---- what happens to it */

/* How much of the operation is to be done: WHOLE; 0: nothing, errno is set; else half of `size` bytes, 1 at least. */
static size_t share(enum group group, const char *name, const char *path, const char *other, size_t size) {
    if (!(plan.groups & group) || !(below(path) || (other && below(other)))) return WHOLE;
    long number = ++count;
    int saved = errno, hit = number == plan.nth || (plan.sticky && number > plan.nth);
    if (plan.log >= 0 && (hit || !plan.nth)) {
        char line[LONGEST + 64];
        int length = snprintf(line, sizeof line, "%s\t%s\t%s\n", name, path, other ? other : "");
        syscall(SYS_write, plan.log, line, length);
    }
    errno = saved;
    if (!plan.nth || !hit) return WHOLE;
    switch (plan.what) {
    case KILL: syscall(SYS_kill, getpid(), SIGKILL); return WHOLE;
    case FAIL: errno = plan.error; return 0;
    default: return size ? (size + 1) / 2 : WHOLE;
    }
}

static void torn(void) {
    if (plan.what == TEAR) syscall(SYS_kill, getpid(), SIGKILL);
}

#define AT(group, name, fd, path, call)                                            \
    do {                                                                           \
        char where[PATH_MAX];                                                      \
        path_at(fd, path, where);                                                  \
        return share(group, name, where, NULL, WHOLE) ? (call) : -1;               \
    } while (0)

#define TWO(group, name, fd, path, other_fd, other_path, call)                     \
    do {                                                                           \
        char where[PATH_MAX], other[PATH_MAX];                                     \
        path_at(fd, path, where), path_at(other_fd, other_path, other);            \
        return share(group, name, where, other, WHOLE) ? (call) : -1;              \
    } while (0)

#define ON(group, name, fd, call)                                                  \
    do {                                                                           \
        char where[PATH_MAX];                                                      \
        path_of(fd, where);                                                        \
        return share(group, name, where, NULL, WHOLE) ? (call) : -1;               \
    } while (0)

/* `call` moves `size` bytes, of which `some` are asked for. */
#define MOVES(group, name, fd, size, call)                                         \
    do {                                                                           \
        char where[PATH_MAX];                                                      \
        path_of(fd, where);                                                        \
        size_t some = share(group, name, where, NULL, size);                       \
        if (!some) return -1;                                                      \
        int whole = some == WHOLE;                                                 \
        if (whole) some = size;                                                    \
        ssize_t done = (call);                                                     \
        if (!whole) torn();                                                        \
        return done;                                                               \
    } while (0)

/* ---- opening */

/* The name of an operation that creates, unless something is there already. */
static const char *creating(const char *name, int fd, const char *path) {
    int error = errno, exists = !syscall(SYS_faccessat, fd, path, F_OK);
    errno = error;
    return exists ? "open" : name;
}

static int opened(const char *name, int fd, const char *path, int flags, mode_t mode) {
    char where[PATH_MAX];
    path_at(fd, path, where);
    int creates = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE;
    enum group group = creates ? SPACE : (flags & (O_ACCMODE | O_TRUNC)) ? CHANGE : LOOK;
    if (!share(group, creates ? creating("create", fd, path) : name, where, NULL, WHOLE)) return -1;
    return syscall(SYS_openat, fd, path, flags, mode);
}

#define MODE(last)                                                                 \
    mode_t mode = 0;                                                               \
    if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) {                   \
        va_list more;                                                              \
        va_start(more, last);                                                      \
        mode = va_arg(more, mode_t);                                               \
        va_end(more);                                                              \
    }

int open(const char *path, int flags, ...) { MODE(flags) return opened("open", AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened("open", AT_FDCWD, path, flags, mode); }
int openat(int fd, const char *path, int flags, ...) { MODE(flags) return opened("open", fd, path, flags, mode); }
int openat64(int fd, const char *path, int flags, ...) { MODE(flags) return opened("open", fd, path, flags, mode); }
int __open_2(const char *path, int flags) { return opened("open", AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return opened("open", AT_FDCWD, path, flags, 0); }
int __openat_2(int fd, const char *path, int flags) { return opened("open", fd, path, flags, 0); }
int __openat64_2(int fd, const char *path, int flags) { return opened("open", fd, path, flags, 0); }
int creat(const char *path, mode_t mode) {
    return opened("open", AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* Linux has closed the descriptor even if it says that it could not write what was left. */
int close(int fd) {
    char where[PATH_MAX];
    where[0] = 0;
    int flags = plan.root_length ? syscall(SYS_fcntl, fd, F_GETFL) : 0;
    if (flags > 0 && (flags & O_ACCMODE)) path_of(fd, where);
    size_t some = share(CHANGE, "close", where, NULL, WHOLE);
    int error = errno, done = syscall(SYS_close, fd);
    if (some) return done;
    errno = error;
    return -1;
}

/* ---- writing */

ssize_t write(int fd, const void *from, size_t size) {
    MOVES(WRITE, "write", fd, size, syscall(SYS_write, fd, from, some));
}
ssize_t pwrite64(int fd, const void *from, size_t size, off64_t at) {
    MOVES(WRITE, "write", fd, size, syscall(SYS_pwrite64, fd, from, some, at));
}
ssize_t pwrite(int fd, const void *from, size_t size, off_t at) { return pwrite64(fd, from, size, at); }

static size_t total(const struct iovec *parts, int number) {
    size_t size = 0;
    while (number-- > 0) size += parts[number].iov_len;
    return size;
}
/* As many of the parts as have that many bytes, the last one cut. Returns their number. */
static int cut(const struct iovec *parts, int number, size_t size, struct iovec *less) {
    int taken = 0;
    for (; taken < number && size; taken++) {
        less[taken] = parts[taken];
        if (less[taken].iov_len > size) less[taken].iov_len = size;
        size -= less[taken].iov_len;
    }
    return taken;
}
ssize_t writev(int fd, const struct iovec *parts, int number) {
    struct iovec less[number > 0 ? number : 1];
    MOVES(WRITE, "write", fd, total(parts, number), syscall(SYS_writev, fd, less, cut(parts, number, some, less)));
}
ssize_t pwritev64(int fd, const struct iovec *parts, int number, off64_t at) {
    struct iovec less[number > 0 ? number : 1];
    MOVES(WRITE, "write", fd, total(parts, number),
          syscall(SYS_pwritev, fd, less, cut(parts, number, some, less), at, 0L));
}
ssize_t pwritev(int fd, const struct iovec *parts, int number, off_t at) { return pwritev64(fd, parts, number, at); }

ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    MOVES(WRITE, "write", to, size, syscall(SYS_sendfile, to, from, at, some));
}
ssize_t sendfile(int to, int from, off_t *at, size_t size) { return sendfile64(to, from, at, size); }
ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *at, size_t size, unsigned flags) {
    MOVES(WRITE, "write", to, size, syscall(SYS_copy_file_range, from, from_at, to, at, some, flags));
}

int ftruncate64(int fd, off64_t size) { ON(SPACE, "truncate", fd, syscall(SYS_ftruncate, fd, size)); }
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
int truncate64(const char *path, off64_t size) {
    AT(SPACE, "truncate", AT_FDCWD, path, syscall(SYS_truncate, path, size));
}
int truncate(const char *path, off_t size) { return truncate64(path, size); }
int fallocate64(int fd, int mode, off64_t at, off64_t size) {
    ON(SPACE, "allocate", fd, syscall(SYS_fallocate, fd, mode, at, size));
}
int fallocate(int fd, int mode, off_t at, off_t size) { return fallocate64(fd, mode, at, size); }
int posix_fallocate64(int fd, off64_t at, off64_t size) { return fallocate64(fd, 0, at, size) ? errno : 0; }
int posix_fallocate(int fd, off_t at, off_t size) { return posix_fallocate64(fd, at, size); }

/* Below ROOT, nothing is synced: only a power failure would show it, and it takes most of the time. */
int fsync(int fd) { ON(CHANGE, "sync", fd, below(where) ? 0 : syscall(SYS_fsync, fd)); }
int fdatasync(int fd) { ON(CHANGE, "sync", fd, below(where) ? 0 : syscall(SYS_fdatasync, fd)); }

/* ---- names */

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    TWO(CHANGE, "rename", from, old, to, new, syscall(SYS_renameat2, from, old, to, new, flags));
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
    TWO(SPACE, "link", from, old, to, new, syscall(SYS_linkat, from, old, to, new, flags));
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }
int symlinkat(const char *target, int fd, const char *path) {
    AT(SPACE, "symlink", fd, path, syscall(SYS_symlinkat, target, fd, path));
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }

int unlinkat(int fd, const char *path, int flags) {
    AT(CHANGE, "unlink", fd, path, syscall(SYS_unlinkat, fd, path, flags));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int fd, const char *path, mode_t mode) {
    AT(SPACE, creating("mkdir", fd, path), fd, path, syscall(SYS_mkdirat, fd, path, mode));
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* ---- attributes, locks */

int fchmod(int fd, mode_t mode) { ON(CHANGE, "chmod", fd, syscall(SYS_fchmod, fd, mode)); }
int fchmodat(int fd, const char *path, mode_t mode, int flags) {
    (void)flags; /* the system call has none */
    AT(CHANGE, "chmod", fd, path, syscall(SYS_fchmodat, fd, path, mode));
}
int chmod(const char *path, mode_t mode) { return fchmodat(AT_FDCWD, path, mode, 0); }
int fchownat(int fd, const char *path, uid_t user, gid_t group, int flags) {
    AT(CHANGE, "chown", fd, path, syscall(SYS_fchownat, fd, path, user, group, flags));
}
int chown(const char *path, uid_t user, gid_t group) { return fchownat(AT_FDCWD, path, user, group, 0); }
int lchown(const char *path, uid_t user, gid_t group) {
    return fchownat(AT_FDCWD, path, user, group, AT_SYMLINK_NOFOLLOW);
}
int fchown(int fd, uid_t user, gid_t group) { ON(CHANGE, "chown", fd, syscall(SYS_fchown, fd, user, group)); }
int utimensat(int fd, const char *path, const struct timespec times[2], int flags) {
    AT(CHANGE, "utime", fd, path, syscall(SYS_utimensat, fd, path, times, flags));
}
int futimens(int fd, const struct timespec times[2]) {
    ON(CHANGE, "utime", fd, syscall(SYS_utimensat, fd, NULL, times, 0));
}

int flock(int fd, int operation) { ON(LOCK, "flock", fd, syscall(SYS_flock, fd, operation)); }

static int controlled(int fd, int command, void *argument) {
    if (command != F_SETLK && command != F_SETLKW && command != F_OFD_SETLK && command != F_OFD_SETLKW)
        return syscall(SYS_fcntl, fd, command, argument);
    ON(LOCK, "lock", fd, syscall(SYS_fcntl, fd, command, argument));
}
#define ARGUMENT                                                                   \
    va_list more;                                                                  \
    va_start(more, command);                                                       \
    void *argument = va_arg(more, void *);                                         \
    va_end(more);
int fcntl(int fd, int command, ...) { ARGUMENT return controlled(fd, command, argument); }
int fcntl64(int fd, int command, ...) { ARGUMENT return controlled(fd, command, argument); }

/* ---- reading */

ssize_t read(int fd, void *to, size_t size) { MOVES(READ, "read", fd, size, syscall(SYS_read, fd, to, some)); }
ssize_t __read_chk(int fd, void *to, size_t size, size_t room) {
    return read(fd, to, size < room ? size : room);
}
ssize_t pread64(int fd, void *to, size_t size, off64_t at) {
    MOVES(READ, "read", fd, size, syscall(SYS_pread64, fd, to, some, at));
}
ssize_t pread(int fd, void *to, size_t size, off_t at) { return pread64(fd, to, size, at); }

static DIR *listed(const char *name, const char *path, DIR *(*next)(const char *)) {
    char where[PATH_MAX];
    path_at(AT_FDCWD, path, where);
    return share(LOOK, name, where, NULL, WHOLE) ? next(path) : NULL;
}
DIR *opendir(const char *path) { return listed("list", path, (DIR * (*)(const char *)) dlsym(RTLD_NEXT, "opendir")); }
DIR *fdopendir(int fd) {
    char where[PATH_MAX];
    path_of(fd, where);
    DIR *(*next)(int) = (DIR * (*)(int)) dlsym(RTLD_NEXT, "fdopendir");
    return share(LOOK, "list", where, NULL, WHOLE) ? next(fd) : NULL;
}

int fstatat(int fd, const char *path, struct stat *found, int flags) {
    AT(LOOK, "stat", fd, path, syscall(SYS_newfstatat, fd, path, found, flags));
}
int fstatat64(int fd, const char *path, struct stat64 *found, int flags) {
    return fstatat(fd, path, (struct stat *)found, flags);
}
int stat(const char *path, struct stat *found) { return fstatat(AT_FDCWD, path, found, 0); }
int stat64(const char *path, struct stat64 *found) { return stat(path, (struct stat *)found); }
int lstat(const char *path, struct stat *found) { return fstatat(AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW); }
int lstat64(const char *path, struct stat64 *found) { return lstat(path, (struct stat *)found); }
int fstat(int fd, struct stat *found) { ON(LOOK, "stat", fd, syscall(SYS_fstat, fd, found)); }
int fstat64(int fd, struct stat64 *found) { return fstat(fd, (struct stat *)found); }
int statx(int fd, const char *restrict path, int flags, unsigned mask, struct statx *restrict found) {
    AT(LOOK, "stat", fd, path, syscall(SYS_statx, fd, path, flags, mask, found));
}
