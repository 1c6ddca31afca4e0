"""How many clients of a secure sum must stay: counting alone, so that planning a sum needs no cryptography."""

from __future__ import annotations

from dataclasses import dataclass

from keyfed.errors import ConfigError

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
    needs its seed and the keys of the a - 1 others, t shares each. Each of n clients gives at most n - t shares of keys
    (they want t survivors). That fails without colluding clients as long as

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


@dataclass(frozen=True, slots=True)
class Floors:
    """A client's own limits, whatever the server asks: the fewest clients it hides among, itself included.

    Any `threshold` members can open a sum of their own vectors alone. So a client hides among N only where the
    threshold is N or more (`check_terms`). With two, either learns the other's values from the sum; three is the least
    that hides anything.
    """

    cohort: int = 3

    def __post_init__(self) -> None:
        if self.cohort < 2:
            raise ConfigError(f"a floor of {self.cohort} clients hides nothing: the least is 2, the usual 3")


@dataclass(frozen=True, slots=True)
class SecureSettings:
    """How strict secure sums are.

    Attributes:
      threshold: clients that must stay to the end of a sum; None for more than two thirds of those called.
      floor: clients below which a client takes no part; as many must stay, whatever the threshold says.
    """

    threshold: int | None = None
    floor: int = 3

    def threshold_of(self, members: int, hide_among: int = 0) -> int:
        """Return how many of the members must stay.

        Args:
          hide_among: the most clients that one of the members wants to hide among.
        """
        usual = usual_threshold(members) if self.threshold is None else self.threshold
        return max(usual, min(members, max(self.floor, hide_among)))

    @property
    def least_group(self) -> int:
        """Return the fewest clients that a sum can be formed over."""
        return max(self.floor, self.threshold or 0)
