/* Stands between a process and its files (LD_PRELOAD): fails, shortens or hangs chosen calls, turns
 * the wall clock, and models the loss of the page cache. Told what to do by a mapped file, which
 * shim.py writes (struct control there and here are one). Raw system calls where it works itself. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, RENAME = 16, UNLINK = 32, SIZE = 64, LIST = 128,
       STAT = 256, MAKE = 512, LOCK = 1024 }; /* MAKE: opens that may write, where they are told apart */
enum { FAIL, SHORT, HANG, DROP };

struct control {
    uint32_t on, ops;
    int32_t error, mode;
    int64_t first, last, seen, hits;
    double seconds, skew;
    uint32_t n_lost, named; /* named: there are no files without a name, as on NFS */
    char aim[512];    /* calls on paths under this one may be hit */
    char only[128];   /* and have this in them */
    char roots[2][512]; /* what a power cut is modelled for */
    char shadow[512]; /* empty: not modelled */
    char what[768];   /* the last call that was hit */
    char boot[512];   /* read instead of the kernel's id of this boot */
};
static struct control *C;
enum { PAGE = 4096 };
#define BOOT "/proc/sys/kernel/random/boot_id"

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("KVWEAVE_FAULTS");
    int fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    C = mmap(NULL, sizeof *C, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (C == MAP_FAILED) C = NULL;
    syscall(SYS_close, fd);
}

#define REAL(ret, name, ...) static ret (*real)(__VA_ARGS__); if (!real) *(void **)&real = dlsym(RTLD_NEXT, name)

static int under(const char *path, const char *root) {
    size_t n = strlen(root);
    return n && !strncmp(path, root, n) && (path[n] == '/' || !path[n] || path[n] == ' ');
}

static const char *of_fd(int fd, char *to) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, to, 1023);
    to[n < 0 ? 0 : n] = 0;
    return to;
}

static const char *of_path(int dir, const char *path, char *to) {
    if (path[0] == '/') return path;
    if (dir == AT_FDCWD) { if (syscall(SYS_getcwd, to, 900) < 0) to[0] = 0; }
    else of_fd(dir, to);
    size_t n = strlen(to);
    snprintf(to + n, 1024 - n, "/%s", path);
    return to;
}

/* 0: go on; 1: fail with errno; 2: do less than was asked for */
static int fault(int op, const char *path) {
    if (!C || !C->on || !(C->ops & op) || !under(path, C->aim) || !strstr(path, C->only)) return 0;
    int64_t n = __atomic_fetch_add(&C->seen, 1, __ATOMIC_SEQ_CST);
    if (n < C->first || n >= C->last) return 0;
    __atomic_fetch_add(&C->hits, 1, __ATOMIC_SEQ_CST);
    snprintf(C->what, sizeof C->what, "%d %s", op, path);
    if (C->mode == SHORT) return 2;
    if (C->mode == HANG) {
        struct timespec step = {0, 5000000};
        for (double left = C->seconds; left > 0 && C->on; left -= .005)
            syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &step, NULL);
        return 0;
    }
    errno = C->error;
    return 1;
}

static int watched(const char *path) {
    return C && C->shadow[0] && (under(path, C->roots[0]) || under(path, C->roots[1]));
}

/* ---- what would be there after a power cut: k.INO keeps a file, d.INO is what was synced of it,
 * l.INO has a byte for each page that a failed sync lost, D.PATH is a directory as it was synced */

static char *part(char *to, char kind, uint64_t ino) {
    snprintf(to, 600, "%s/%c.%llu", C->shadow, kind, (unsigned long long)ino);
    return to;
}

static unsigned char *slurp(const char *path, size_t *n) {
    *n = 0;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY);
    if (fd < 0) return NULL;
    struct stat st;
    syscall(SYS_fstat, fd, &st);
    unsigned char *all = malloc(st.st_size + 1);
    for (ssize_t got; (got = syscall(SYS_pread64, fd, all + *n, st.st_size - *n, *n)) > 0;) *n += got;
    syscall(SYS_close, fd);
    return all;
}

static void spill(const char *path, const void *data, size_t n) {
    char next[640];
    snprintf(next, sizeof next, "%s~%ld", path, syscall(SYS_gettid));
    int fd = syscall(SYS_openat, AT_FDCWD, next, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (size_t done = 0; done < n;) done += syscall(SYS_write, fd, (const char *)data + done, n - done);
    syscall(SYS_close, fd);
    syscall(SYS_rename, next, path);
}

static void keep_dir(const char *path) {
    char name[1100], kept[600], entry[1300], *lines = malloc(1 << 20);
    size_t n = 0;
    struct dirent *e;
    DIR *(*list)(const char *) = (DIR * (*)(const char *)) dlsym(RTLD_NEXT, "opendir");
    DIR *dir = list(path);
    while (dir && (e = readdir(dir))) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        n += snprintf(lines + n, (1 << 20) - n, "%llu %s\n", (unsigned long long)e->d_ino, e->d_name);
        snprintf(entry, sizeof entry, "%s/%s", path, e->d_name);
        if (e->d_type == DT_REG) syscall(SYS_linkat, AT_FDCWD, entry, AT_FDCWD, part(kept, 'k', e->d_ino), 0);
    }
    if (dir) closedir(dir);
    snprintf(name, sizeof name, "%s/D.", C->shadow);
    size_t at = strlen(name);
    snprintf(name + at, sizeof name - at, "%s", path);
    for (char *c = name + at; *c; c++) if (*c == '/') *c = '%';
    spill(name, lines, n);
    free(lines);
}

/* After a sync that worked (`lost` 0), or one that failed and took what was dirty with it (1). */
static void synced(int fd, const char *path, int lost) {
    struct stat st;
    char link[64], a[600], b[600];
    if (!watched(path) || syscall(SYS_fstat, fd, &st)) return;
    if (S_ISDIR(st.st_mode)) { if (!lost) keep_dir(path); return; }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    syscall(SYS_linkat, AT_FDCWD, link, AT_FDCWD, part(a, 'k', st.st_ino), AT_SYMLINK_FOLLOW);
    size_t n, n_old, n_map;
    unsigned char *now = slurp(link, &n), *old = slurp(part(a, 'd', st.st_ino), &n_old);
    unsigned char *map = slurp(part(b, 'l', st.st_ino), &n_map);
    size_t pages = (n + PAGE - 1) / PAGE;
    unsigned char *gone = calloc(pages + 1, 1);
    for (size_t i = 0; now && i < pages; i++) {
        size_t from = i * PAGE, len = n - from < PAGE ? n - from : PAGE;
        size_t had = n_old > from ? (n_old - from < len ? n_old - from : len) : 0;
        int same = had == len && old && !memcmp(now + from, old + from, len);
        gone[i] = (i < n_map && map[i]) || (lost && !same);
        if (!lost && gone[i]) {
            if (had) memcpy(now + from, old + from, had);
            memset(now + from + had, 0, len - had);
        }
    }
    if (lost) { C->n_lost++; spill(b, gone, pages); }
    else if (now) spill(a, now, n);
    free(now), free(old), free(map), free(gone);
}

/* Pages that are written again are dirty again: the next sync takes them. */
static void wrote(int fd, int64_t at, ssize_t n) {
    char path[1024], b[600];
    struct stat st;
    if (!C || n <= 0 || !C->shadow[0]) return;
    int saved = errno, flags = syscall(SYS_fcntl, fd, F_GETFL);
    if (C->n_lost && watched(of_fd(fd, path)) && !syscall(SYS_fstat, fd, &st)) {
        if (at < 0) at = syscall(SYS_lseek, fd, 0, SEEK_CUR) - n;
        size_t n_map;
        unsigned char *map = slurp(part(b, 'l', st.st_ino), &n_map);
        for (size_t i = at / PAGE; map && i < n_map && i * PAGE < (size_t)(at + n); i++) map[i] = 0;
        if (map) spill(b, map, n_map);
        free(map);
    }
    if (flags & O_DSYNC) synced(fd, of_fd(fd, path), 0);
    errno = saved;
}

/* ---- the calls */

#define OPENING(dirfd, path, how)                                                                  \
    mode_t mode = 0;                                                                               \
    va_list rest;                                                                                  \
    va_start(rest, how);                                                                           \
    if (how & (O_CREAT | O_TMPFILE)) mode = va_arg(rest, mode_t);                                  \
    va_end(rest);                                                                                  \
    char buffer[1024];                                                                             \
    if (C && C->boot[0] && !strcmp(path, BOOT)) path = C->boot;                                    \
    if (C && C->named && (how & O_TMPFILE) == O_TMPFILE) { errno = EOPNOTSUPP; return -1; }        \
    int writes = C && C->ops & MAKE && how & (O_WRONLY | O_RDWR | O_CREAT);                        \
    if (fault(writes ? MAKE : OPEN, of_path(dirfd, path, buffer)) == 1) return -1;                 \
    return syscall(SYS_openat, dirfd, path, how | O_LARGEFILE, mode)

int open(const char *p, int how, ...) { OPENING(AT_FDCWD, p, how); }
int open64(const char *p, int how, ...) { OPENING(AT_FDCWD, p, how); }
int openat(int d, const char *p, int how, ...) { OPENING(d, p, how); }
int openat64(int d, const char *p, int how, ...) { OPENING(d, p, how); }
int creat64(const char *p, mode_t m) { return open(p, O_CREAT | O_WRONLY | O_TRUNC, m); }
int creat(const char *p, mode_t m) { return creat64(p, m); }

#define LOOK(op, fd)                                                                               \
    char path[1024];                                                                               \
    int hit = C && C->on && (C->ops & op) ? fault(op, of_fd(fd, path)) : 0;                        \
    if (hit == 1) return -1;

static size_t less(size_t n) { return n > 1 ? n / 2 : n; }

ssize_t read(int fd, void *to, size_t n) { LOOK(READ, fd) return syscall(SYS_read, fd, to, hit ? less(n) : n); }
ssize_t pread64(int fd, void *to, size_t n, off64_t at) { LOOK(READ, fd) return syscall(SYS_pread64, fd, to, hit ? less(n) : n, at); }
ssize_t pread(int fd, void *to, size_t n, off_t at) { return pread64(fd, to, n, at); }

/* A short vector: half of its first buffer. */
#define VECTOR(op, number, ...)                                                                    \
    LOOK(op, fd)                                                                                   \
    struct iovec one = n ? v[0] : (struct iovec){0};                                               \
    if (hit == 2 && n) { one.iov_len = less(one.iov_len); v = &one; n = 1; }                       \
    ssize_t did = syscall(number, fd, v, n, ##__VA_ARGS__)

ssize_t readv(int fd, const struct iovec *v, int n) { VECTOR(READ, SYS_readv); return did; }
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int how) { VECTOR(READ, SYS_preadv2, at, 0L, how); return did; }
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t at, int how) { return preadv64v2(fd, v, n, at, how); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) { return preadv64v2(fd, v, n, at, 0); }
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) { return preadv64v2(fd, v, n, at, 0); }

/* Asynchronous reads come by no other function. What is to fail is not asked of the system: its event is
 * kept, and told by the next call that waits for this context. */
static struct { uint64_t context; struct io_event event; } refused[256];
static int n_refused, at_refused;

static long submit(long (*real)(long, ...), uint64_t context, long n, struct iocb **all) {
    char path[1024];
    for (long i = 0; i < n; i++) {
        int hit = fault(READ, of_fd(all[i]->aio_fildes, path));
        if (hit == 2) all[i]->aio_nbytes = less(all[i]->aio_nbytes);
        if (hit != 1) {
            if (real(SYS_io_submit, context, 1L, all + i) != 1) return i ? i : -1;
            continue;
        }
        struct io_event event = {all[i]->aio_data, (uint64_t)all[i], -errno, 0};
        while (__atomic_exchange_n(&at_refused, 1, __ATOMIC_ACQUIRE));
        if (n_refused == sizeof refused / sizeof *refused) abort();
        refused[n_refused].context = context, refused[n_refused++].event = event;
        __atomic_store_n(&at_refused, 0, __ATOMIC_RELEASE);
    }
    return n;
}

static long told(uint64_t context, long most, struct io_event *to) {
    long n = 0;
    while (__atomic_exchange_n(&at_refused, 1, __ATOMIC_ACQUIRE));
    for (int i = n_refused; i-- && n < most;)
        if (refused[i].context == context) to[n++] = refused[i].event, refused[i] = refused[--n_refused];
    __atomic_store_n(&at_refused, 0, __ATOMIC_RELEASE);
    return n;
}

long syscall(long number, ...) {
    REAL(long, "syscall", long, ...);
    long a[6], n;
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_io_submit && C && C->on && C->ops & READ) return submit(real, a[0], a[1], (struct iocb **)a[2]);
    if (number == SYS_io_getevents && C && (n = told(a[0], a[2], (struct io_event *)a[3]))) return n;
    struct io_event gone;
    if (number == SYS_io_destroy && C) while (told(a[0], 1, &gone)); /* its number may be given again */
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

ssize_t write(int fd, const void *from, size_t n) {
    LOOK(WRITE, fd) ssize_t did = syscall(SYS_write, fd, from, hit ? less(n) : n);
    wrote(fd, -1, did);
    return did;
}
ssize_t pwrite64(int fd, const void *from, size_t n, off64_t at) {
    LOOK(WRITE, fd) ssize_t did = syscall(SYS_pwrite64, fd, from, hit ? less(n) : n, at);
    wrote(fd, at, did);
    return did;
}
ssize_t pwrite(int fd, const void *from, size_t n, off_t at) { return pwrite64(fd, from, n, at); }
ssize_t writev(int fd, const struct iovec *v, int n) { VECTOR(WRITE, SYS_writev); wrote(fd, -1, did); return did; }
ssize_t pwritev64v2(int fd, const struct iovec *v, int n, off64_t at, int how) {
    VECTOR(WRITE, SYS_pwritev2, at, 0L, how); wrote(fd, at, did); return did;
}
ssize_t pwritev2(int fd, const struct iovec *v, int n, off_t at, int how) { return pwritev64v2(fd, v, n, at, how); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t at) { return pwritev64v2(fd, v, n, at, 0); }
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t at) { return pwritev64v2(fd, v, n, at, 0); }
ssize_t copy_file_range(int in, off64_t *i, int fd, off64_t *o, size_t n, unsigned how) {
    LOOK(WRITE, fd) return syscall(SYS_copy_file_range, in, i, fd, o, hit ? less(n) : n, how);
}
ssize_t sendfile64(int fd, int in, off64_t *at, size_t n) {
    LOOK(WRITE, fd) return syscall(SYS_sendfile, fd, in, at, hit ? less(n) : n);
}

/* Where a power cut is modelled nothing is synced for real: the model is what counts. */
static int sync_with(int fd, long number) {
    char path[1024];
    if (!C) return syscall(number, fd);
    int hit = fault(SYNC, of_fd(fd, path)), saved = errno;
    if (hit == 1) {
        if (C->mode == DROP) synced(fd, path, 1);
        errno = saved;
        return -1;
    }
    if (!watched(path)) return syscall(number, fd);
    synced(fd, path, 0);
    return 0;
}
int fsync(int fd) { return sync_with(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_with(fd, SYS_fdatasync); }
int sync_file_range(int fd, off64_t at, off64_t n, unsigned how) { LOOK(SYNC, fd) return syscall(SYS_sync_file_range, fd, at, n, how); }

#define AT(op, dir, p) char name[1024]; if (fault(op, of_path(dir, p, name)) == 1) return -1
int renameat2(int d, const char *p, int e, const char *q, unsigned how) { AT(RENAME, e, q); return syscall(SYS_renameat2, d, p, e, q, how); }
int renameat(int d, const char *p, int e, const char *q) { return renameat2(d, p, e, q, 0); }
int rename(const char *p, const char *q) { return renameat2(AT_FDCWD, p, AT_FDCWD, q, 0); }
int linkat(int d, const char *p, int e, const char *q, int how) { AT(RENAME, e, q); return syscall(SYS_linkat, d, p, e, q, how); }
int link(const char *p, const char *q) { return linkat(AT_FDCWD, p, AT_FDCWD, q, 0); }
int unlinkat(int d, const char *p, int how) { AT(UNLINK, d, p); return syscall(SYS_unlinkat, d, p, how); }
int unlink(const char *p) { return unlinkat(AT_FDCWD, p, 0); }
int mkdirat(int d, const char *p, mode_t m) { AT(C && C->ops & MAKE ? MAKE : OPEN, d, p); return syscall(SYS_mkdirat, d, p, m); }
int mkdir(const char *p, mode_t m) { return mkdirat(AT_FDCWD, p, m); }
DIR *opendir(const char *p) {
    char name[1024];
    if (fault(LIST, of_path(AT_FDCWD, p, name)) == 1) return NULL;
    REAL(DIR *, "opendir", const char *);
    return real(p);
}

/* What is asked of a name, and of an open file. */
#define ASKED(dir, p) char name[1024]; if (fault(STAT, of_path(dir, p, name)) == 1) return -1
int fstatat64(int d, const char *p, struct stat64 *to, int how) {
    REAL(int, "fstatat64", int, const char *, struct stat64 *, int);
    ASKED(d, p);
    return real(d, p, to, how);
}
int fstatat(int d, const char *p, struct stat *to, int how) { return fstatat64(d, p, (struct stat64 *)to, how); }
int stat64(const char *p, struct stat64 *to) { return fstatat64(AT_FDCWD, p, to, 0); }
int lstat64(const char *p, struct stat64 *to) { return fstatat64(AT_FDCWD, p, to, AT_SYMLINK_NOFOLLOW); }
int stat(const char *p, struct stat *to) { return stat64(p, (struct stat64 *)to); }
int lstat(const char *p, struct stat *to) { return lstat64(p, (struct stat64 *)to); }
int statx(int d, const char *p, int how, unsigned mask, struct statx *to) {
    if (*p) { ASKED(d, p); return syscall(SYS_statx, d, p, how, mask, to); }
    return syscall(SYS_statx, d, p, how, mask, to);
}
int fstat64(int fd, struct stat64 *to) {
    REAL(int, "fstat64", int, struct stat64 *);
    LOOK(STAT, fd)
    return real(fd, to);
}
int fstat(int fd, struct stat *to) { return fstat64(fd, (struct stat64 *)to); }
int faccessat(int d, const char *p, int wanted, int how) {
    REAL(int, "faccessat", int, const char *, int, int);
    ASKED(d, p);
    return real(d, p, wanted, how);
}
int access(const char *p, int wanted) { return faccessat(AT_FDCWD, p, wanted, 0); }
int statvfs64(const char *p, struct statvfs64 *to) {
    REAL(int, "statvfs64", const char *, struct statvfs64 *);
    ASKED(AT_FDCWD, p);
    return real(p, to);
}
int statvfs(const char *p, struct statvfs *to) { return statvfs64(p, (struct statvfs64 *)to); }
int flock(int fd, int how) { LOOK(LOCK, fd) return syscall(SYS_flock, fd, how); }

int ftruncate64(int fd, off64_t n) { LOOK(SIZE, fd) return syscall(SYS_ftruncate, fd, n); }
int ftruncate(int fd, off_t n) { return ftruncate64(fd, n); }
int fallocate64(int fd, int how, off64_t at, off64_t n) { LOOK(SIZE, fd) return syscall(SYS_fallocate, fd, how, at, n); }
int fallocate(int fd, int how, off_t at, off_t n) { return fallocate64(fd, how, at, n); }
int posix_fallocate64(int fd, off64_t at, off64_t n) { return fallocate64(fd, 0, at, n) ? errno : 0; }
int posix_fallocate(int fd, off_t at, off_t n) { return posix_fallocate64(fd, at, n); }

int clock_gettime(clockid_t which, struct timespec *to) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int rc = real(which, to);
    if (!rc && C && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) to->tv_sec += (time_t)C->skew;
    return rc;
}
int gettimeofday(struct timeval *to, void *zone) {
    REAL(int, "gettimeofday", struct timeval *, void *);
    int rc = real(to, zone);
    if (C) to->tv_sec += (time_t)C->skew;
    return rc;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
