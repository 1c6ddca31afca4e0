"""How many clients of a secure sum must stay: counting alone, so that planning a sum needs no cryptography."""

from __future__ import annotations

MOST_RATIO = 16  # of the largest to the least scale of a layer, however large the sum
PRIVATE_RATIO = 2  # in a private sum, however many are drawn: that of the smallest sum that opens, of three clients


def usual_threshold(members: int) -> int:
    """Return ⌊2n/3⌋ + 1, the least threshold at which losses before the upload cost no safety (`least_alive`).

    A server that tells half of the clients that one is lost, and the others that it is not, needs t shares of its key
    and t of its seed, and every honest client gives one: more than a third of the clients would have to collude.

    Example:
      >>> [usual_threshold(n) for n in (3, 4, 10, 50)]
      [3, 3, 7, 34]
    """
    return 2 * members // 3 + 1


def least_alive(members: int, threshold: int) -> int:
    r"""Return how many members must have shared before one of them uploads: below, different lists could open it.

    A server may tell every client another list of survivors. To open the upload of a client with a members alive it
    needs its seed and the keys of the a - 1 others, t shares each, from n clients that each give at most n - t shares
    of keys (they want t survivors). That fails without colluding clients as long as

    .. math:: (a - 1) t > n (n - t)

    Example:
      >>> [least_alive(50, t) for t in (26, 30, 34)]
      [48, 35, 34]
    """
    return max(threshold, members * (members - threshold) // threshold + 2)


def most_ratio(threshold: int) -> int:
    r"""Return r = min(16, t − 1): how many times the least scale of a layer the largest may be in a sum.

    A scale is what multiplies an upload. With scales within [1/r, 1] and n ≥ t contributors one client is at most

    .. math:: \frac{1}{1 + (n - 1)/r} ≤ \min\left(\frac12, \frac{16}{n + 15}\right)

    of a layer's sum, whatever the method, its options and the server's public numbers are. At t ≤ 2 all count alike.

    Example:
      >>> [most_ratio(t) for t in (2, 3, 7, 17, 34)]
      [1, 2, 6, 16, 16]
    """
    return max(1, min(MOST_RATIO, threshold - 1))
