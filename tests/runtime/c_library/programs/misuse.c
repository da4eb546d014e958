/* misuse BUNDLE DAMAGED: every wrong call gives its code and a text, and the right ones go on. */

#include <math.h>

#include "check.h"

static void wrong_parameters(eg_model model)
{
    eg_request request = 7;
    eg_params params = EG_PARAMS_INIT;
    eg_bias bias = {3, 1000.0f};
    const char *stop[] = {"a", NULL};
    const char *broken[] = {"\xff"};
    int32_t outside[] = {5, 1 << 30};

    params.temperature = -1.0f;
    COMES_TO(EG_REQUEST, "temperature is -1.0", eg_submit(model, "a", &params, &request));
    CHECK(request == 0);
    params.temperature = (float)NAN;
    COMES_TO(EG_REQUEST, "temperature is nan", eg_submit(model, "a", &params, &request));
    params = (eg_params)EG_PARAMS_INIT;
    params.top_p = 1.5f;
    params.top_k = -2;
    COMES_TO(EG_REQUEST, "top_k is -2", eg_submit(model, "a", &params, &request));
    params = (eg_params)EG_PARAMS_INIT;
    params.max_new_tokens = -5;
    COMES_TO(EG_REQUEST, "max_new_tokens is -5", eg_submit(model, "a", &params, &request));
    params = (eg_params)EG_PARAMS_INIT;
    params.logprobs = 21;
    COMES_TO(EG_REQUEST, "logprobs is 21", eg_submit(model, "a", &params, &request));
    params = (eg_params)EG_PARAMS_INIT;
    params.bias = &bias;
    params.bias_count = 1;
    COMES_TO(EG_REQUEST, "logit_bias has 3: 1000.0", eg_submit(model, "a", &params, &request));
    params.bias_count = (size_t)1 << 40;
    COMES_TO(EG_REQUEST, "bias_count is", eg_submit(model, "a", &params, &request));
    params.bias = NULL;
    COMES_TO(EG_ARGUMENT, "bias is NULL", eg_submit(model, "a", &params, &request));
    params = (eg_params)EG_PARAMS_INIT;
    params.stop = stop;
    params.stop_count = 2;
    COMES_TO(EG_ARGUMENT, "stop[1] is NULL", eg_submit(model, "a", &params, &request));
    params.stop_count = (size_t)1 << 40;
    COMES_TO(EG_REQUEST, "stop_count is", eg_submit(model, "a", &params, &request));
    params.stop = broken;
    params.stop_count = 1;
    COMES_TO(EG_ARGUMENT, "stop[0] is no UTF-8", eg_submit(model, "a", &params, &request));

    COMES_TO(EG_REQUEST, "no tokens", eg_submit(model, "", NULL, &request));
    COMES_TO(EG_ARGUMENT, "prompt is no UTF-8", eg_submit(model, "\xc3", NULL, &request));
    COMES_TO(EG_REQUEST, "no tokens", eg_submit_tokens(model, NULL, 0, NULL, &request));
    COMES_TO(EG_REQUEST, "1073741824", eg_submit_tokens(model, outside, 2, NULL, &request));
    COMES_TO(EG_REQUEST, "tokens", eg_submit_tokens(model, outside, (size_t)-1, NULL, &request));
}

static void null_pointers(eg_model model, eg_request request)
{
    size_t length;
    CHECK(eg_open(NULL, NULL, NULL) == EG_ARGUMENT);
    COMES_TO(EG_ARGUMENT, "`model` is NULL", eg_open("x", NULL, NULL));
    COMES_TO(EG_ARGUMENT, "`bundle` is NULL", eg_open(NULL, NULL, &model));
    CHECK(model == 0);
    COMES_TO(EG_ARGUMENT, "`request` is NULL", eg_submit(1, "a", NULL, NULL));
    COMES_TO(EG_ARGUMENT, "`prompt` is NULL", eg_submit(1, NULL, NULL, &request));
    COMES_TO(EG_ARGUMENT, "`request` is NULL", eg_submit_tokens(1, NULL, 0, NULL, NULL));
    COMES_TO(EG_ARGUMENT, "`tokens` is NULL", eg_submit_tokens(1, NULL, 3, NULL, &request));
    COMES_TO(EG_ARGUMENT, "`piece` is NULL", eg_next(1, 0, NULL));
    COMES_TO(EG_ARGUMENT, "`on_piece` is NULL", eg_stream(1, NULL, NULL));
    COMES_TO(EG_ARGUMENT, "`usage` is NULL", eg_usage(1, NULL));
    COMES_TO(EG_ARGUMENT, "`load` is NULL", eg_load(1, NULL));
    COMES_TO(EG_ARGUMENT, "`length` is NULL", eg_metrics(1, NULL, 0, NULL));
    COMES_TO(EG_CLOSED, "0 is no model", eg_close(0));
    COMES_TO(EG_CLOSED, "0 is no request", eg_cancel(0));
    COMES_TO(EG_CLOSED, "0 is no request", eg_release(0));
    COMES_TO(EG_CLOSED, "0 is no model", eg_metrics(0, NULL, 0, &length));
    CHECK(eg_last_error(NULL) == EG_CLOSED);
}

static void sizes(eg_model model)
{
    eg_request request;
    eg_params params = EG_PARAMS_INIT;
    eg_options options = EG_OPTIONS_INIT;
    eg_model other;
    eg_piece piece = EG_PIECE_INIT;
    params.size = 0;
    COMES_TO(EG_ARGUMENT, "`params` has the size 0", eg_submit(model, "a", &params, &request));
    params.size = (size_t)-1;
    COMES_TO(EG_ARGUMENT, "INIT macro", eg_submit(model, "a", &params, &request));
    options.size = 1;
    COMES_TO(EG_ARGUMENT, "`options` has the size 1", eg_open("x", &options, &other));
    piece.size = 3;
    COMES_TO(EG_ARGUMENT, "`piece` has the size 3", eg_next(1, 0, &piece));
}

static void bundles(const char *good, const char *damaged)
{
    eg_model model = 9;
    eg_options options = EG_OPTIONS_INIT;
    COMES_TO(EG_BUNDLE, "/no/such/folder", eg_open("/no/such/folder", NULL, &model));
    CHECK(model == 0);
    COMES_TO(EG_BUNDLE, damaged, eg_open(damaged, NULL, &model));
    COMES_TO(EG_ARGUMENT, "bundle is no UTF-8", eg_open("/\xff", NULL, &model));
    options.threads = -3;
    COMES_TO(EG_CONFIG, "threads is -3", eg_open(good, &options, &model));
    options = (eg_options)EG_OPTIONS_INIT;
    options.tensor_parallel = 2;
    COMES_TO(EG_CONFIG, "needs 1 rank", eg_open(good, &options, &model));
    options = (eg_options)EG_OPTIONS_INIT;
    options.max_length = 1 << 30;
    COMES_TO(EG_REQUEST, "max_length is", eg_open(good, &options, &model));
    CHECK(model == 0);
}

static void closed_handles(eg_model model, const char *answer, const eg_params *params)
{
    eg_request request, late;
    eg_load_t load = EG_LOAD_INIT;
    eg_piece piece = EG_PIECE_INIT;
    eg_usage_t usage = EG_USAGE_INIT;
    CHECK(eg_submit(model, "a", params, &request) == EG_OK);
    COMES_TO(EG_CLOSED, "is no model", eg_close(request));
    COMES_TO(EG_CLOSED, "is no request", eg_release(model));
    CHECK(eg_release(request) == EG_OK);
    COMES_TO(EG_CLOSED, "closed, or never was", eg_release(request));
    COMES_TO(EG_CLOSED, "is no request", eg_next(request, -1, &piece));
    COMES_TO(EG_CLOSED, "is no request", eg_cancel(request));
    COMES_TO(EG_CLOSED, "is no request", eg_usage(request, &usage));

    char *again = answer_of(model, "a", params);
    CHECK(strcmp(again, answer) == 0);
    free(again);

    CHECK(eg_submit(model, "a", params, &late) == EG_OK && late > request);
    CHECK(eg_close(model) == EG_OK);
    COMES_TO(EG_CLOSED, "is no model", eg_close(model));
    COMES_TO(EG_CLOSED, "is no model", eg_submit(model, "a", NULL, &request));
    COMES_TO(EG_CLOSED, "is no model", eg_load(model, &load));
    /* Requests outlive their model: this one is read to its end, whichever that is. */
    eg_status status;
    while ((status = eg_next(late, -1, &piece)) == EG_OK)
        CHECK(piece.finish != EG_FAILED);
    CHECK(status == EG_END && eg_next(late, -1, &piece) == EG_END);
    CHECK(eg_usage(late, &usage) == EG_OK && eg_release(late) == EG_OK);
}

int main(int count, char **words)
{
    const char *text = NULL;
    eg_model model;
    eg_params params = EG_PARAMS_INIT;
    CHECK(count == 3);
    CHECK(eg_last_error(&text) == EG_OK && strcmp(text, "") == 0);
    null_pointers(1, 1);
    bundles(words[1], words[2]);
    CHECK(eg_open(words[1], NULL, &model) == EG_OK);
    params.max_new_tokens = 5;
    char *answer = answer_of(model, "a", &params);
    wrong_parameters(model);
    sizes(model);
    closed_handles(model, answer, &params);
    free(answer);
    return 0;
}
