"""A sum of integer vectors of which the server learns nothing but the total: double masking with drop-outs.

Three messages, after everybody's one-time keys are known (`SumTerms`):

    member   shares()              encrypted shares of its seed and mask key    →  Collector.take_shares, forward
    member   masked(x, alive, …)   values under its own and all pairs' masks    →  Collector.take_masked, survivors
    member   unmask(survivors)     shares: survivors' seeds, lost ones' keys    →  Collector.take_unmask, total

Pairs' masks cancel in the sum; those with a lost member are rebuilt from its shared key, own masks from shared seeds.
Values of a client declared lost stay hidden even if its upload arrives late, because its seed is then never shared.
Any `threshold` of the survivors open the sum; with fewer it stays hidden.

A client that lies about shares is proved to: packages carry hashes of the shares in them (`wire`), and a package that
does not open is accused with evidence (`accusation`). One that lies about its values may spoil the sum, and is looked
for over several sums (`accusation`).

What it does not do: the sum itself is shown. A client that lies about its values so that the sum can still be right is
not found. A server that invents clients sees what they do not hide. Nothing is claimed to run in constant time. There
is no consistency round: clients do not compare the lists they get. A server that tells all the same lists needs
t - 1 colluding clients to open one client's vector. One that tells them different lists cannot open it alone
(`least_alive`), but with fewer colluding clients than that: counting shares, at the usual threshold, 8 of 50.

References:
  Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS 2017; complete graph,
  signed keys, no consistency round.
"""
