/* plugin LIBRARY BUNDLE: load the library as a plugin is, for itself alone, and leave a signal to
 * the thread that it is meant for. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <export_grok.h>

static volatile sig_atomic_t heard = 0;
static pthread_t first;

static void hear(int number)
{
    (void)number;
    heard = pthread_equal(pthread_self(), first) ? 1 : 2;
}

static void need(int law, const char *what)
{
    if (!law) {
        fprintf(stderr, "not so: %s: %s\n", what, dlerror());
        exit(1);
    }
}

int main(int count, char **words)
{
    eg_model model;
    sigset_t usr, before, after;
    struct sigaction action = {.sa_handler = hear}, handlers[NSIG];
    need(count == 3, "two arguments");
    void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    need(library != NULL, "the library loads");
    eg_status (*open)(const char *, const eg_options *, eg_model *);
    eg_status (*close)(eg_model);
    *(void **)&open = dlsym(library, "eg_open");
    *(void **)&close = dlsym(library, "eg_close");
    need(open != NULL && close != NULL, "it has its functions");
    first = pthread_self();
    sigaction(SIGUSR1, &action, NULL);
    for (int each = 1; each < NSIG; each++)
        sigaction(each, NULL, &handlers[each]);
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    need(open(words[2], NULL, &model) == EG_OK, "the bundle opens");
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int each = 1; each < NSIG; each++) {
        need(sigismember(&before, each) == sigismember(&after, each), "the mask is as it was");
        sigaction(each, NULL, &action);
        need(action.sa_handler == handlers[each].sa_handler, "handlers are as they were");
    }

    /* Blocked here, it waits: no thread of the library takes it. */
    sigemptyset(&usr);
    sigaddset(&usr, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &usr, NULL);
    kill(getpid(), SIGUSR1);
    usleep(50000);
    need(heard == 0, "no other thread hears a signal");
    pthread_sigmask(SIG_UNBLOCK, &usr, NULL);
    need(heard == 1, "this one does");

    need(close(model) == EG_OK, "the model closes");
    dlclose(library);
    return 0;
}
