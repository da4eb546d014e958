/* forked BUNDLE: a child that was forked is told so, and harms nothing. It ends by _exit: at an exit
 * ONNX Runtime waits for its threads, which a fork leaves behind. */

#define _POSIX_C_SOURCE 200809L
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

int main(int count, char **words)
{
    eg_model model;
    eg_request request;
    eg_params params = EG_PARAMS_INIT;
    int ended;
    CHECK(count == 2);
    params.max_new_tokens = 3;
    CHECK(eg_open(words[1], NULL, &model) == EG_OK);
    CHECK(eg_submit(model, "a", NULL, &request) == EG_OK);
    pid_t child = fork();
    if (child == 0) {
        COMES_TO(EG_PYTHON, "forked", eg_cancel(request));
        COMES_TO(EG_PYTHON, "forked", eg_close(model));
        _exit(7);
    }
    CHECK(waitpid(child, &ended, 0) == child && WIFEXITED(ended) && WEXITSTATUS(ended) == 7);
    free(answer_of(model, "a", &params));
    CHECK(eg_close(model) == EG_OK);
    return 0;
}
