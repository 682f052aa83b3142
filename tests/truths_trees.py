"""Slow reference implementations of tree building. A distribution maps a text (a tuple of tokens) to next-token
probabilities."""

import heapq
import itertools
import math


def slow_best_first(distribution, depth, count, stops=()):
    """Pop the most probable text, then push its children; {text: probability}, best first."""
    heap = [(-p, (token,)) for token, p in enumerate(distribution(())) if p > 0]
    heapq.heapify(heap)
    nodes = {}
    while heap and len(nodes) < count and depth > 0:
        minus, text = heapq.heappop(heap)
        nodes[text] = -minus
        if len(text) < depth and text[-1] not in stops:
            for token, p in enumerate(distribution(text)):
                if p > 0:
                    heapq.heappush(heap, (minus * p, (*text, token)))
    return nodes


def slow_eagle2(distribution, depth, count, width, per_node, stops=()):
    """Level by level: continue the `width` best by `per_node` children each; of all seen, return the best `count`."""
    level, seen = {(): 1.0}, {}
    for _ in range(depth):
        children = {}
        for text, mass in level.items():
            ranked = sorted(enumerate(distribution(text)), key=lambda pair: -pair[1])[:per_node]
            children |= {(*text, token): mass * p for token, p in ranked if p > 0}
        seen |= children
        going_on = [text for text in sorted(children, key=lambda text: -children[text]) if text[-1] not in stops]
        level = {text: children[text] for text in going_on[:width]}
    ranked = sorted(seen, key=lambda text: (-seen[text], len(text)))
    return {text: seen[text] for text in ranked[:count]}


def texts(tree):
    """The text of every node of a TokenTree but the root, in order."""
    tokens, parents = tree.tokens_N.tolist(), tree.parents_N.tolist()
    texts_so_far = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        texts_so_far.append((*texts_so_far[parent], token))
    return texts_so_far[1:]


def slow_acceptance(tree, weights, recent):
    """{node: probability} from the definition: a regression on q, at most the least of all nodes above."""

    def path_prob(node):
        return 0.5 ** len(texts(tree)[node - 1]) if tree.path_probs_N is None else float(tree.path_probs_N[node])

    def alone(node):
        depth, q = len(texts(tree)[node - 1]), path_prob(node)
        rank = 1 + sum((-path_prob(other), other) < (-q, node) for other in range(1, len(tree)))
        logit = math.log(min(max(q, 1e-9), 1 - 1e-6)) - math.log1p(-min(max(q, 1e-9), 1 - 1e-6))
        inputs = (1, logit, math.log(depth), logit * math.log(depth), max(0.0, logit), math.log(rank), recent)
        return 1 / (1 + math.exp(-sum(w * x for w, x in zip(weights, inputs, strict=True))))

    parents, found = tree.parents_N.tolist(), {0: 1.0}
    for node in range(1, len(parents)):
        found[node] = min(alone(node), found[parents[node]])
    return {node: prob for node, prob in found.items() if node > 0}


def slow_best_size(tree, probs, sizes, times, rate):
    """Try every subtree of every size; the greatest 1 + sum of probs - rate * time, and the size of it."""
    parents, best = tree.parents_N.tolist(), (-math.inf, None)
    for size, time in zip(sizes, times, strict=True):
        for kept in itertools.combinations(range(1, len(parents)), min(size, len(parents)) - 1):
            if all(parents[node] in (0, *kept) for node in kept):
                worth = 1 + sum(probs[node] for node in kept) - rate * time
                best = max(best, (worth, -size))  # of equals the smaller
    return best[0], -best[1]


def slow_merge(first, second, count):
    """Merge trees as {text: probability}; the `count` best."""
    seen = [dict(zip(texts(tree), tree.path_probs_N.tolist()[1:], strict=True)) for tree in (first, second)]
    merged = {text: 1 - (1 - seen[0].get(text, 0)) * (1 - seen[1].get(text, 0)) for text in seen[0] | seen[1]}
    return {text: merged[text] for text in sorted(merged, key=lambda text: -merged[text])[:count]}
