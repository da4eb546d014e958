/* The end of a program that left models open: they are closed before anything else ends.
 *
 * An engine's thread that computes while its library is taken down crashes. What exit() calls, it
 * calls in the order of registration, the last first, and an engine's library registers its own end
 * bit by bit, when it first needs something. So what is registered here is moved to the front again:
 * in exit() itself, by the end of the thread that called it, which comes before all else; and, for
 * a thread that never called this library, behind the first piece and every answer. */

#include <pthread.h>

#include "interface.h"

/* Of the system's C library, for C++: like atexit, with an argument and an owner, whose functions
 * can be called and taken out again; and the same for the end of a thread. */
extern int __cxa_atexit(void (*function)(void *), void *argument, void *owner);
extern void __cxa_finalize(void *owner);
extern int __cxa_thread_atexit_impl(void (*function)(void *), void *argument, void *library);
extern void *__dso_handle;

static char owner; /* its address is ours alone */
static pthread_mutex_t moved = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int moving = 0;
static _Thread_local int known = 0;

static void close_all(void *unused)
{
    (void)unused;
    if (!moving && eg_goes_on())
        (void)eg_py_close_all();
}

void eg_end_first(void)
{
    pthread_mutex_lock(&moved);
    moving = 1;
    __cxa_finalize(&owner);
    moving = 0;
    (void)__cxa_atexit(close_all, NULL, &owner);
    pthread_mutex_unlock(&moved);
}

static void end_of_thread(void *unused)
{
    (void)unused;
    eg_end_first();
}

void eg_know_thread(void)
{
    if (known)
        return;
    known = 1;
    (void)__cxa_thread_atexit_impl(end_of_thread, NULL, &__dso_handle);
}
