/* The wall clock of a process, moved while it runs, as a clock that is set anew: preloaded by
 * tests. The file that KVLIFT_TEST_CLOCK names holds the seconds to add, as one int64. Monotonic
 * clocks stay. Waits until a moment of the wall clock are moved back, since the kernel's own clock
 * has not jumped. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t nothing = 0;
static const volatile int64_t *shift_s = &nothing;

__attribute__((constructor)) static void look_at_the_hand(void) {
    const char *path = getenv("KVLIFT_TEST_CLOCK");
    int hand = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (hand < 0)
        return;
    void *seen = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, hand, 0);
    if (seen != MAP_FAILED)
        shift_s = seen;
    close(hand);
}

static int is_wall(clockid_t id) {
    return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
}

/* Uptimes are below this for thirty years, moments of the wall clock above it since 2001. */
static struct timespec as_the_kernel_counts(const struct timespec *until) {
    struct timespec moved = *until;
    if (moved.tv_sec > 1000000000)
        moved.tv_sec -= *shift_s;
    return moved;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (!failed && is_wall(id))
        now->tv_sec += *shift_s;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (into)
        *into = precise.tv_sec;
    return precise.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex,
                           const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec moved = as_the_kernel_counts(until);
    return real(cond, mutex, &moved);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moved = as_the_kernel_counts(until);
    return real(semaphore, &moved);
}
