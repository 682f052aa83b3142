"""Slow truths of tree building. A law is a function from a text (a tuple of words) to the probabilities of the next."""

import heapq


def slow_best_first(law, depth, count, stops=()):
    """Pop the most probable text there is, then put its children in; {text: probability}, best first."""
    heap = [(-p, (word,)) for word, p in enumerate(law(())) if p > 0]
    heapq.heapify(heap)
    nodes = {}
    while heap and len(nodes) < count and depth > 0:
        minus, text = heapq.heappop(heap)
        nodes[text] = -minus
        if len(text) < depth and text[-1] not in stops:
            for word, p in enumerate(law(text)):
                if p > 0:
                    heapq.heappush(heap, (minus * p, (*text, word)))
    return nodes


def slow_eagle2(law, depth, count, width, words, stops=()):
    """Level by level: continue the `width` best by `words` children each; of all that were seen, the best `count`."""
    level, seen = {(): 1.0}, {}
    for _ in range(depth):
        children = {}
        for text, mass in level.items():
            ranked = sorted(enumerate(law(text)), key=lambda pair: -pair[1])[:words]
            children |= {(*text, word): mass * p for word, p in ranked if p > 0}
        seen |= children
        going_on = [text for text in sorted(children, key=lambda text: -children[text]) if text[-1] not in stops]
        level = {text: children[text] for text in going_on[:width]}
    ranked = sorted(seen, key=lambda text: (-seen[text], len(text)))
    return {text: seen[text] for text in ranked[:count]}


def texts(tree):
    """The text of every node of a TokenTree but the root, in order."""
    tokens, parents = tree.tokens_N.tolist(), tree.parents_N.tolist()
    found = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]
