/* cancel BUNDLE TIMES: submit and cancel, each time after another number of pieces; print by how
 * many kB the process grew behind the first tenth. */

#include <unistd.h>

#include "check.h"

static long resident_kb(void)
{
    long all, resident;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%ld %ld", &all, &resident) == 2);
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static void cancel_after(eg_model model, int pieces)
{
    eg_request request;
    eg_piece piece = EG_PIECE_INIT;
    eg_params params = EG_PARAMS_INIT;
    eg_status status;
    params.ignore_eos = 1;
    CHECK(eg_submit(model, "On the second night the wind", &params, &request) == EG_OK);
    for (int taken = 0; taken < pieces; taken++)
        CHECK(eg_next(request, -1, &piece) == EG_OK && piece.finish == EG_GOES_ON);
    CHECK(eg_cancel(request) == EG_OK);
    while ((status = eg_next(request, -1, &piece)) == EG_OK)
        CHECK(piece.finish != EG_FAILED); /* it may have ended before it was cancelled */
    CHECK(status == EG_END && piece.text == NULL);
    CHECK(eg_release(request) == EG_OK);
}

int main(int count, char **words)
{
    eg_model model;
    eg_load_t before = EG_LOAD_INIT, after = EG_LOAD_INIT;
    eg_params params = EG_PARAMS_INIT;
    long warm = 0;
    CHECK(count == 3);
    int times = atoi(words[2]);
    params.max_new_tokens = 8;
    CHECK(eg_open(words[1], NULL, &model) == EG_OK);
    char *answer = answer_of(model, "The lamp", &params);
    CHECK(eg_load(model, &before) == EG_OK);
    srand(1);
    for (int done = 0; done < times; done++) {
        if (done == times / 10)
            warm = resident_kb();
        cancel_after(model, rand() % 12);
    }
    printf("%ld\n", resident_kb() - warm);
    CHECK(eg_load(model, &after) == EG_OK);
    CHECK(after.running == 0 && after.waiting == 0 && after.cache_tokens == before.cache_tokens);
    char *again = answer_of(model, "The lamp", &params);
    CHECK(strcmp(answer, again) == 0);
    CHECK(eg_close(model) == EG_OK);
    free(answer);
    free(again);
    return 0;
}
