"""How many clients of a secure sum must stay: counting alone, so that planning a sum needs no cryptography."""

from __future__ import annotations


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
