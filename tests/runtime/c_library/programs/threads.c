/* threads BUNDLE: 16 clients ask at once, cancel, release under each other's feet, and get the
 * answers that each prompt has alone. */

#define _POSIX_C_SOURCE 200809L
#include <pthread.h>

#include "check.h"

enum { CLIENTS = 16, ROUNDS = 4, PROMPTS = 4 };

static const char *const prompts[PROMPTS] = {"The lamp", "On the second night", "a", "The wind"};
static char *expected[PROMPTS];
static eg_params params = EG_PARAMS_INIT;
static eg_model model;

static void *client(void *number)
{
    int own = *(const int *)number;
    const char *text;
    for (int round = 0; round < ROUNDS; round++) {
        int which = (own + round) % PROMPTS;
        eg_request given_up;
        char *answer = answer_of(model, prompts[which], &params);
        CHECK(strcmp(answer, expected[which]) == 0);
        free(answer);
        CHECK(eg_submit(model, prompts[which], NULL, &given_up) == EG_OK);
        if (own % 2)
            CHECK(eg_cancel(given_up) == EG_OK);
        CHECK(eg_release(given_up) == EG_OK);
        /* The last error is each thread's own. */
        eg_request never = 1000000 + (eg_request)own;
        char name[32];
        snprintf(name, sizeof name, "%d is no request", 1000000 + own);
        CHECK(eg_cancel(never) == EG_CLOSED);
        CHECK(eg_last_error(&text) == EG_CLOSED && strstr(text, name) == text);
    }
    return NULL;
}

/* Another pulls, this one lets the request go: the puller hears of it. */
static void *puller(void *request)
{
    eg_piece piece = EG_PIECE_INIT;
    eg_status status;
    while ((status = eg_next(*(eg_request *)request, -1, &piece)) == EG_OK)
        continue;
    CHECK(status == EG_CLOSED || status == EG_END);
    return NULL;
}

int main(int count, char **words)
{
    pthread_t threads[CLIENTS];
    int numbers[CLIENTS];
    eg_load_t load = EG_LOAD_INIT;
    eg_options options = EG_OPTIONS_INIT;
    CHECK(count == 2);
    options.batch = 4;
    params.max_new_tokens = 12;
    CHECK(eg_open(words[1], &options, &model) == EG_OK);
    for (int each = 0; each < PROMPTS; each++)
        expected[each] = answer_of(model, prompts[each], &params);
    for (int each = 0; each < CLIENTS; each++) {
        numbers[each] = each;
        CHECK(pthread_create(&threads[each], NULL, client, &numbers[each]) == 0);
    }
    for (int each = 0; each < CLIENTS; each++)
        CHECK(pthread_join(threads[each], NULL) == 0);

    eg_request request;
    CHECK(eg_submit(model, "a", NULL, &request) == EG_OK);
    CHECK(pthread_create(&threads[0], NULL, puller, &request) == 0);
    CHECK(eg_release(request) == EG_OK);
    CHECK(pthread_join(threads[0], NULL) == 0);

    do
        CHECK(eg_load(model, &load) == EG_OK);
    while (load.running + load.waiting > 0);
    CHECK(eg_close(model) == EG_OK);
    for (int each = 0; each < PROMPTS; each++)
        free(expected[each]);
    return 0;
}
