/* c_path BUNDLE TOKENS: for each line of stdin answer a prompt, and print the seconds from its
 * submission to its end. */

#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <export_grok.h>

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void need(eg_status status)
{
    const char *text;
    if (status >= 0)
        return;
    eg_last_error(&text);
    fprintf(stderr, "%s\n", text);
    exit(1);
}

int main(int count, char **words)
{
    eg_model model;
    eg_params params = EG_PARAMS_INIT;
    eg_options options = EG_OPTIONS_INIT;
    char line[16];
    if (count != 3)
        return 2;
    params.max_new_tokens = atoi(words[2]);
    params.ignore_eos = 1;
    options.batch = 1;
    need(eg_open(words[1], &options, &model));
    while (fgets(line, sizeof line, stdin) != NULL) {
        eg_request request;
        eg_piece piece = EG_PIECE_INIT;
        eg_status status;
        double began = now();
        need(eg_submit(model, "The lamp", &params, &request));
        while ((status = eg_next(request, -1, &piece)) == EG_OK)
            continue;
        need(status);
        printf("%.9f\n", now() - began);
        fflush(stdout);
        need(eg_release(request));
    }
    need(eg_close(model));
    return 0;
}
