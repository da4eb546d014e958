"""Logits to tokens: penalty, bias, temperature, the k best, the nucleus, one draw; logprobs.

With l the logits of a row, h the tokens of its prompt and answer, u its random number in [0, 1)::

    a = l, where h holds the token: l / repetition_penalty if l > 0, else l * repetition_penalty
    a = a + logit_bias                                                          adjust.py
    x = a / temperature
    keep = the top_k largest x, of those the nucleus of mass top_p, of those
           the ones with exp(x) >= min_p * exp(largest x)                       filters.py
    token = the first id whose sum of exp(x) over kept ids up to it is
            more than u times the whole sum; for temperature 0 the largest a    draw.py
    logprobs = l - log(sum of exp(l))                                           logprobs.py

Legend: `R` rows, `V` vocabulary. No row looks at another or at its own place.
"""
