/* leave BUNDLE HOW: print the processes of the ranks, then leave in the middle of an answer:
 * "return" from main, "exit" in a thread, "_exit", or "die" of a signal; or "kill" a rank, read the
 * error, and leave. "early" is the same as "return", before the engine computed anything. */

#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "check.h"

/* Print the children of all threads; kill the last one if asked to. */
static void children(int kill_one)
{
    long child = 0;
    DIR *threads = opendir("/proc/self/task");
    CHECK(threads != NULL);
    for (struct dirent *entry; (entry = readdir(threads)) != NULL;) {
        char path[512];
        snprintf(path, sizeof path, "/proc/self/task/%s/children", entry->d_name);
        FILE *file = fopen(path, "r");
        while (file != NULL && fscanf(file, "%ld", &child) == 1)
            printf("%ld\n", child);
        if (file != NULL)
            fclose(file);
    }
    closedir(threads);
    fflush(stdout);
    if (kill_one)
        CHECK(child > 1 && kill((pid_t)child, SIGKILL) == 0);
}

static void *leaving(void *request)
{
    CHECK(eg_cancel(*(eg_request *)request) == EG_OK);
    exit(0);
}

int main(int count, char **words)
{
    eg_model model;
    eg_request request;
    pthread_t thread;
    int32_t prompt[] = {5, 6, 7};
    eg_piece piece = EG_PIECE_INIT;
    eg_params params = EG_PARAMS_INIT;
    eg_status status;
    CHECK(count == 3);
    params.ignore_eos = 1;
    CHECK(eg_open(words[1], NULL, &model) == EG_OK);
    CHECK(eg_submit_tokens(model, prompt, 3, &params, &request) == EG_OK);
    if (strcmp(words[2], "early") == 0)
        return 0;
    CHECK(eg_next(request, -1, &piece) == EG_OK);
    children(strcmp(words[2], "kill") == 0);
    if (strcmp(words[2], "exit") == 0) {
        CHECK(pthread_create(&thread, NULL, leaving, &request) == 0);
        pthread_join(thread, NULL);
    }
    if (strcmp(words[2], "_exit") == 0)
        _exit(0);
    if (strcmp(words[2], "die") == 0)
        raise(SIGKILL);
    if (strcmp(words[2], "kill") == 0) {
        while ((status = eg_next(request, -1, &piece)) == EG_OK)
            continue;
        if (status == EG_END) { /* it was quicker: the next one meets a rank that is gone */
            CHECK(eg_submit_tokens(model, prompt, 3, &params, &request) == EG_OK);
            while ((status = eg_next(request, -1, &piece)) == EG_OK)
                continue;
        }
        CHECK(piece.text == NULL);
        COMES_TO(EG_ENGINE, "rank", eg_next(request, -1, &piece));
        COMES_TO(EG_CLOSED, "rank", eg_submit_tokens(model, prompt, 3, NULL, &request));
    }
    return 0;
}
