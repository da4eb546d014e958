/* bytes BUNDLE TOKEN...: let the model say these tokens only, at random, and print the text. Where
 * they are bytes of characters, no piece ends inside of one. */

#include "check.h"

int main(int count, char **words)
{
    eg_model model;
    eg_bias bias[16];
    eg_params params = EG_PARAMS_INIT;
    CHECK(count > 2 && count - 2 <= 16);
    for (int each = 2; each < count; each++)
        bias[each - 2] = (eg_bias){atoi(words[each]), 100.0f};
    params.bias = bias;
    params.bias_count = (size_t)(count - 2);
    params.temperature = 4.0f;
    params.top_k = count - 2;
    params.seed = 5;
    params.max_new_tokens = 100;
    CHECK(eg_open(words[1], NULL, &model) == EG_OK);
    char *text = answer_of(model, "a", &params);
    fputs(text, stdout);
    free(text);
    CHECK(eg_close(model) == EG_OK);
    return 0;
}
