/* Another library with a SIGBUS handler, for test_guard_handlers.py: it keeps a page of its own alive, counts what it is
 * asked, and hands on what is not its own to whoever was there before. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static char *own;
static long own_bytes;
static int asked, hands_on;
static struct sigaction before;

static void on_sigbus(int number, siginfo_t *info, void *context) {
    char *at = info->si_addr;
    asked++;
    if (own != NULL && at >= own && at < own + own_bytes) {
        mmap(own, own_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        return;
    }
    if (!hands_on) _exit(42);
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
    else if (before.sa_handler == SIG_DFL) signal(number, SIG_DFL);
    else if (before.sa_handler != SIG_IGN) before.sa_handler(number);
}

void other_install(int flags, int does_hand_on) {
    struct sigaction action = {0};
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO | flags;
    hands_on = does_hand_on;
    sigaction(SIGBUS, &action, &before);
}

void other_keep(char *address, long num_bytes) { own = address, own_bytes = num_bytes; }
int other_asked(void) { return asked; }
