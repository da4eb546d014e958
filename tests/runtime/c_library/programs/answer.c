/* answer BUNDLE PROMPT TOKENS: print an answer, pulled; then hold it to be the same by callback. */

#include "check.h"

struct told {
    char *text;
    size_t length;
    int pieces;
    int finish;
};

static int take(void *user, const eg_piece *piece)
{
    struct told *told = user;
    CHECK(is_whole(piece->text, piece->length));
    told->text = realloc(told->text, told->length + piece->length + 1);
    CHECK(told->text != NULL);
    memcpy(told->text + told->length, piece->text, piece->length + 1);
    told->length += piece->length;
    told->pieces++;
    told->finish = piece->finish;
    return 0;
}

static int take_two(void *user, const eg_piece *piece)
{
    return take(user, piece) != 0 || ((struct told *)user)->pieces == 2;
}

int main(int count, char **words)
{
    eg_model model;
    eg_request request;
    eg_params params = EG_PARAMS_INIT;
    eg_usage_t usage = EG_USAGE_INIT;
    eg_load_t load = EG_LOAD_INIT;
    struct told told = {NULL, 0, 0, -1};
    CHECK(count == 4);
    CHECK(eg_abi_version() == EG_ABI_VERSION);
    params.max_new_tokens = atoi(words[3]);
    params.ignore_eos = 1;

    CHECK(eg_open(words[1], NULL, &model) == EG_OK);
    char *text = answer_of(model, words[2], &params);
    fputs(text, stdout);

    CHECK(eg_submit(model, words[2], &params, &request) == EG_OK);
    CHECK(eg_stream(request, take, &told) == EG_END);
    CHECK(strcmp(told.text, text) == 0);
    CHECK(told.pieces == params.max_new_tokens && told.finish == EG_LENGTH);
    CHECK(eg_usage(request, &usage) == EG_OK);
    CHECK(usage.new_tokens == params.max_new_tokens && usage.prompt_tokens > 0);
    CHECK(usage.first_token_seconds > 0 && usage.waited_seconds >= 0);
    CHECK(eg_release(request) == EG_OK);
    free(told.text);

    /* A callback that has enough is not called again. */
    told = (struct told){NULL, 0, 0, -1};
    params.max_new_tokens = 0;
    CHECK(eg_submit(model, words[2], &params, &request) == EG_OK);
    CHECK(eg_stream(request, take_two, &told) == EG_END);
    CHECK(told.pieces == 2);
    CHECK(eg_release(request) == EG_OK);

    CHECK(eg_load(model, &load) == EG_OK);
    CHECK(load.batch >= 1 && load.running == 0 && load.waiting == 0 && load.cache_tokens == 0);
    CHECK(eg_close(model) == EG_OK);
    free(told.text);
    free(text);
    return 0;
}
