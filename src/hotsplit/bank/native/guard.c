/* Mapped files whose pages can be lost: a touch reads zeros and is counted, where it would end the process.
 *
 *   guard_add     watch a mapping; the handler comes with the first one
 *   guard_begin   before a use: see that the handler is still the one that is asked first; how many breaks there were
 *   guard_breaks  after it: how many there are now. The same number: nobody has read a zero that is not the file's.
 *   guard_mend    map the file again where zeros lie now
 *   guard_drop    forget a mapping, before it is unmapped; the handler goes with the last one
 *
 * A mapping is whole, or zeros as a whole: parts would split it into more pieces than a process may have. Its state says
 * which, and how often that has changed; a change is counted before a zero can be read:
 *
 *   WHOLE -> BREAKING -> BROKEN      the thread that touched a lost page; others that touch one meanwhile try again
 *   BROKEN -> MENDING -> WHOLE       guard_mend, while nobody relies on the bytes
 *
 * A SIGBUS that is about anything else goes to the handler that was there before. One that is installed over ours has ours
 * for its own "before"; when ours comes first again it is as another function, so that each of them has one handler below
 * it: whoever calls or restores what was there before gets the very one, and nobody is asked twice.
 *
 * Source: sigaction(2), mmap(2), mremap(2) (an old size of 0 maps the same pages of a shared mapping once more).
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>

/* Where mmap is a system call of six plain arguments. */
#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__) || (defined(__riscv) && __riscv_xlen == 64))

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ABI = 1 };
enum { MOST_RANGES = 65536 }; /* mappings that Linux lets a process have, unless told otherwise (vm.max_map_count) */
enum { WHOLE = 0, BREAKING = 1, BROKEN = 2, MENDING = 3, STATES = 4 };

struct range {
    _Atomic uint64_t version;     /* odd while start and end change */
    _Atomic uintptr_t start, end; /* whole pages; 0 where nothing is watched */
    _Atomic uint64_t state;       /* how often it has changed, times STATES, and which */
    _Atomic uint64_t broken_at;   /* byte of the mapping whose touch broke it */
    void *spare;                  /* one page of the same file that nobody touches: what to map again */
};

/* One of our functions, and the handler that was there when it was installed; never changed once it can be called. */
struct level {
    void (*function)(int number, siginfo_t *info, void *context);
    struct sigaction below;
    int is_used;
    _Atomic int is_spent; /* the one below wanted to be called once only, and was */
};

static struct range ranges[MOST_RANGES];
static _Atomic int64_t used_ranges; /* of the table, from its start */
static int64_t watched_ranges;
static _Atomic uint64_t breaks;
static atomic_flag lock = ATOMIC_FLAG_INIT; /* of all but the handler */

static void take_lock(void) {
    while (atomic_flag_test_and_set(&lock)) sched_yield();
}

static void release_lock(void) { atomic_flag_clear(&lock); }

/* ---- what the handler does; async-signal-safe ---- */

static int map_zeros(uintptr_t start, uintptr_t end) {
    /* The system call itself: the library's function may be another library's, which may take a lock. */
    const long got = syscall(SYS_mmap, start, end - start, PROT_READ,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0L);
    return got == (long)start;
}

static int break_range(struct range *range, uintptr_t start, uintptr_t end, uintptr_t at) {
    uint64_t seen = atomic_load(&range->state);
    if (seen % STATES != WHOLE || !atomic_compare_exchange_strong(&range->state, &seen, seen + STATES + BREAKING))
        return 1; /* another thread is at it, or was: touch again */
    atomic_store(&range->broken_at, at - start);
    atomic_fetch_add(&breaks, 1);
    const int is_mapped = map_zeros(start, end);
    atomic_store(&range->state, seen + STATES + (is_mapped ? BROKEN : WHOLE));
    return is_mapped;
}

/* Whether a fault was in a range of ours, which reads zeros now. */
static int is_caught(const siginfo_t *info) {
    if (info->si_code != BUS_ADRERR && info->si_code != BUS_OBJERR && info->si_code != BUS_MCEERR_AR) return 0;
    const uintptr_t at = (uintptr_t)info->si_addr;
    const int64_t count = atomic_load(&used_ranges);
    for (int64_t i = 0; i < count; i++) {
        struct range *range = &ranges[i];
        const uint64_t version = atomic_load(&range->version);
        const uintptr_t start = atomic_load(&range->start), end = atomic_load(&range->end);
        if (at >= start && at < end && version % 2 == 0 && atomic_load(&range->version) == version)
            return break_range(range, start, end, at);
    }
    return 0;
}

/* End the process as if nobody had ever asked for the signal. */
static void by_default(int number, const siginfo_t *info) {
    struct sigaction action = {0};
    action.sa_handler = SIG_DFL;
    sigemptyset(&action.sa_mask);
    sigaction(number, &action, NULL);
    if (info->si_code <= 0) raise(number); /* sent by somebody; a fault comes again by itself */
}

static void pass_on(struct level *level, int number, siginfo_t *info, void *context) {
    const struct sigaction *below = &level->below;
    const int has_details = (below->sa_flags & SA_SIGINFO) != 0;
    if (!has_details && below->sa_handler == SIG_IGN && info->si_code <= 0) return;
    if (!has_details && (below->sa_handler == SIG_DFL || below->sa_handler == SIG_IGN)) {
        by_default(number, info); /* which a fault cannot be spared, also where it is ignored */
        return;
    }
    if ((below->sa_flags & (int)SA_RESETHAND) && atomic_exchange(&level->is_spent, 1)) {
        by_default(number, info);
        return;
    }
    sigset_t blocked = below->sa_mask, before;
    if (!(below->sa_flags & SA_NODEFER)) sigaddset(&blocked, number);
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
    if (has_details)
        below->sa_sigaction(number, info, context);
    else
        below->sa_handler(number);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

enum { MOST_LEVELS = 8 };
static struct level levels[MOST_LEVELS];

static void on_sigbus(int level, int number, siginfo_t *info, void *context) {
    const int saved = errno;
    if (!is_caught(info)) pass_on(&levels[level], number, info, context);
    errno = saved;
}

#define LEVEL(n) \
    static void on_sigbus_##n(int number, siginfo_t *info, void *context) { on_sigbus(n, number, info, context); }
LEVEL(0) LEVEL(1) LEVEL(2) LEVEL(3) LEVEL(4) LEVEL(5) LEVEL(6) LEVEL(7)

static struct level levels[MOST_LEVELS] = {
    {.function = on_sigbus_0}, {.function = on_sigbus_1}, {.function = on_sigbus_2}, {.function = on_sigbus_3},
    {.function = on_sigbus_4}, {.function = on_sigbus_5}, {.function = on_sigbus_6}, {.function = on_sigbus_7},
};

/* ---- coming and going of the handler, under the lock ---- */

/* Which of our functions a handler is; NULL for somebody else's. */
static struct level *level_of(const struct sigaction *action) {
    if (!(action->sa_flags & SA_SIGINFO)) return NULL;
    for (int i = 0; i < MOST_LEVELS; i++)
        if (action->sa_sigaction == levels[i].function) return &levels[i];
    return NULL;
}

static int is_same(const struct sigaction *a, const struct sigaction *b) {
    if ((a->sa_flags ^ b->sa_flags) & (int)(SA_SIGINFO | SA_NODEFER | SA_RESETHAND)) return 0;
    return a->sa_flags & SA_SIGINFO ? a->sa_sigaction == b->sa_sigaction : a->sa_handler == b->sa_handler;
}

/* With more handlers under ours than there are levels the latest stays before ours, and hands on to it if it does so. */
static void come_first(void) {
    struct sigaction now, ours = {0};
    if (sigaction(SIGBUS, NULL, &now) != 0 || level_of(&now) != NULL) return;
    int i = 0;
    while (i < MOST_LEVELS && levels[i].is_used && !is_same(&levels[i].below, &now)) i++;
    if (i == MOST_LEVELS) return;
    if (!levels[i].is_used) levels[i].below = now;
    levels[i].is_used = 1;
    atomic_store(&levels[i].is_spent, 0);
    ours.sa_sigaction = levels[i].function;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, NULL);
}

/* Where another handler has been put over ours it may call ours, which passes everything on from now on. */
static void step_back(void) {
    struct sigaction now;
    const struct level *level = sigaction(SIGBUS, NULL, &now) == 0 ? level_of(&now) : NULL;
    if (level != NULL) sigaction(SIGBUS, &level->below, NULL);
}

/* ---- what Python calls ---- */

static void set_range(struct range *range, uintptr_t start, uintptr_t end) {
    atomic_fetch_add(&range->version, 1);
    atomic_store(&range->start, start);
    atomic_store(&range->end, end);
    atomic_fetch_add(&range->version, 1);
}

static uintptr_t whole_pages(int64_t num_bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    return ((uintptr_t)num_bytes + page - 1) / page * page;
}

int64_t guard_abi(void) { return ABI; }

/* Watches a shared mapping of a file, all of it, from its start; a number of its own, or -1 where that cannot be. */
int64_t guard_add(void *address, int64_t num_bytes) {
    void *spare = mremap(address, 0, whole_pages(1), MREMAP_MAYMOVE);
    if (spare == MAP_FAILED) return -1;
    take_lock();
    int64_t number = 0;
    while (number < MOST_RANGES && atomic_load(&ranges[number].end) != 0) number++;
    if (number < MOST_RANGES) {
        struct range *range = &ranges[number];
        range->spare = spare;
        atomic_store(&range->state, atomic_load(&range->state) / STATES * STATES + STATES + WHOLE);
        set_range(range, (uintptr_t)address, (uintptr_t)address + whole_pages(num_bytes));
        if (number >= atomic_load(&used_ranges)) atomic_store(&used_ranges, number + 1);
        if (watched_ranges++ == 0) come_first();
    }
    release_lock();
    if (number < MOST_RANGES) return number;
    munmap(spare, whole_pages(1));
    return -1;
}

void guard_drop(int64_t number) {
    take_lock();
    struct range *range = &ranges[number];
    set_range(range, 0, 0);
    munmap(range->spare, whole_pages(1));
    if (--watched_ranges == 0) step_back();
    release_lock();
}

uint64_t guard_begin(void) {
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now) == 0 && level_of(&now) == NULL) {
        take_lock();
        if (watched_ranges > 0) come_first();
        release_lock();
    }
    return atomic_load(&breaks);
}

uint64_t guard_breaks(void) {
    atomic_thread_fence(memory_order_seq_cst); /* the bytes were read before */
    return atomic_load(&breaks);
}

uint64_t guard_state(int64_t number) {
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load(&ranges[number].state);
}

/* Byte of the mapping whose touch broke it last. */
uint64_t guard_broken_at(int64_t number) { return atomic_load(&ranges[number].broken_at); }

/* Maps the file again; 0, or why that cannot be: EAGAIN where it is whole, or another thread is at it. */
int64_t guard_mend(int64_t number) {
    struct range *range = &ranges[number];
    uint64_t seen = atomic_load(&range->state);
    if (seen % STATES != BROKEN || !atomic_compare_exchange_strong(&range->state, &seen, seen - BROKEN + MENDING))
        return EAGAIN;
    const uintptr_t start = atomic_load(&range->start), end = atomic_load(&range->end);
    void *got = mremap(range->spare, 0, end - start, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)start);
    const int failure = got == MAP_FAILED ? errno : 0;
    if (failure) map_zeros(start, end); /* it may have been unmapped already */
    atomic_store(&range->state, seen - BROKEN + (failure ? BROKEN : WHOLE));
    return failure;
}

#else

int64_t guard_abi(void) { return 0; }

#endif
