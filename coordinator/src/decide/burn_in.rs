//! Are the devices of a generation's ranks fit, and must they prove it?
//!
//! In a burn-in every rank repeats one product of two fixed matrices for some seconds, compares each result with the first, and
//! takes part in sums that are known beforehand. All ranks of a formation burn in together or none does, since they sum together.
//!
//! **When**: whenever one of the chosen workers has not passed a burn-in since its daemon came, or is suspected of silent
//! corruption. Restarts with the same workers are therefore as fast as without.
//!
//! **Who is to blame**, in the order of what the evidence is worth: who differs from itself; who differs from the majority of the
//! devices of the same name (bits of different models are not comparable); the host whose own sum is wrong; the few that hold
//! another sum than most. What is wrong with all ranks blames nobody: one bad link or memory spoils everybody's sum, and one
//! library everybody's products.

use std::collections::BTreeMap;
use std::time::Duration;

use trainctl_spec::job::Device;
use trainctl_spec::report::{BurnInReport, SumCheck};

use super::replicas::{Agreement, decide_replicas};

/// How long a burn-in takes where the spec does not say.
pub const USUAL: Duration = Duration::from_secs(5);

/// What is known of the device of a worker that is to carry a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// It has passed a burn-in since its daemon came.
    pub has_passed: bool,
    /// It is suspected of silent corruption, and has not passed a burn-in since.
    pub is_suspect: bool,
}

/// How long the ranks of a formation burn in; zero = they do not.
///
/// `written` is `fault_tolerance.burn_in_seconds`. 0 says never, and is obeyed for suspects too. Without it the device decides,
/// but a suspect is checked whatever the device is.
pub fn decide_due(written: Option<f64>, device: Device, chosen: &[Standing]) -> Duration {
    let is_due = chosen.iter().any(|standing| !standing.has_passed || standing.is_suspect);
    let has_suspect = chosen.iter().any(|standing| standing.is_suspect);
    let time = match (written, device) {
        (Some(seconds), _) => Duration::try_from_secs_f64(seconds).unwrap_or_default(),
        (None, Device::Cuda) => USUAL,
        (None, Device::Cpu) if has_suspect => USUAL,
        (None, Device::Cpu) => Duration::ZERO,
    };
    if is_due { time } else { Duration::ZERO }
}

/// The decision on a burn-in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing is wrong with any device.
    Fit,
    /// Something is.
    Wrong(Wrong),
}

/// A burn-in that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Who is to blame, with the reason and figures for a ticket; where nothing says who, everybody that may be.
    pub suspects: BTreeMap<u32, String>,
    /// It is they.
    pub named: bool,
}

impl Wrong {
    /// All reasons, each once.
    pub fn message(&self) -> String {
        let mut ranks_by_reason: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (rank, reason) in &self.suspects {
            ranks_by_reason.entry(reason).or_default().push(rank.to_string());
        }
        if let [(reason, _)] = ranks_by_reason.iter().collect::<Vec<_>>()[..] {
            return (*reason).to_owned();
        }
        let parts = ranks_by_reason.into_iter().map(|(reason, ranks)| format!("rank {}: {reason}", ranks.join(", ")));
        parts.collect::<Vec<_>>().join("; ")
    }
}

/// Judges what the ranks of a generation, by number, have reported.
pub fn decide_burn_in(reports: &BTreeMap<u32, BurnInReport>) -> Outcome {
    let own = of(reports, wrong_rounds);
    let (outvoted, undecided) = compare_digests(reports, &own);
    let named = own.into_iter().chain(outvoted).collect();
    // Sums do not go through the products: where devices miscalculate, that comes first.
    let node_sums = of(reports, |report| wrong_sum("the sum over the ranks of its host", report.node_sum));
    let world_sums = of(reports, |report| wrong_sum("the sum over all ranks", report.world_sum));
    let few = 2 * world_sums.len() < reports.len();
    let (sums_of_few, sums_of_many) = if few { (world_sums, BTreeMap::new()) } else { (BTreeMap::new(), world_sums) };
    let evidence = [(named, true), (node_sums, true), (sums_of_few, true), (undecided, false), (sums_of_many, false)];
    let first = evidence.into_iter().find(|(suspects, _)| !suspects.is_empty());
    first.map_or(Outcome::Fit, |(suspects, named)| {
        // What all of several do has one cause: a library, a driver, the fabric.
        let named = named && (reports.len() == 1 || suspects.len() < reports.len());
        Outcome::Wrong(Wrong { suspects, named })
    })
}

/// The ranks of which `wrong` says something.
fn of(reports: &BTreeMap<u32, BurnInReport>, wrong: impl Fn(&BurnInReport) -> Option<String>) -> BTreeMap<u32, String> {
    reports.iter().filter_map(|(rank, report)| Some((*rank, wrong(report)?))).collect()
}

fn wrong_rounds(report: &BurnInReport) -> Option<String> {
    let BurnInReport { wrong_rounds, rounds, work, .. } = report;
    let what = format!("{work}: {wrong_rounds} of {rounds} products differed from the first; {}", pace(report));
    (*wrong_rounds > 0).then_some(what)
}

fn wrong_sum(what: &str, sum: Option<SumCheck>) -> Option<String> {
    let SumCheck { seconds, wrong_elements } = sum.filter(|sum| sum.wrong_elements > 0)?;
    Some(format!("{what} was wrong in {wrong_elements} elements ({:.1} ms)", seconds * 1e3))
}

/// What a device does, for a ticket.
fn pace(report: &BurnInReport) -> String {
    let device = if report.device.is_empty() { "device of an unknown name" } else { &report.device };
    format!("{:.0} gigaflop/s over {:.1} s on {device}", report.gigaflops, report.seconds)
}

/// Compares the first products of devices of one name, but for those of ranks that differ from themselves. Who is outvoted, and
/// who differs where no majority says who is wrong.
fn compare_digests(
    reports: &BTreeMap<u32, BurnInReport>,
    own: &BTreeMap<u32, String>,
) -> (BTreeMap<u32, String>, BTreeMap<u32, String>) {
    let mut groups: BTreeMap<(&str, &str), BTreeMap<u32, u128>> = BTreeMap::new();
    for (rank, report) in reports.iter().filter(|(rank, report)| !own.contains_key(rank) && !report.device.is_empty()) {
        groups.entry((&report.device, &report.work)).or_default().insert(*rank, report.digest);
    }
    let (mut outvoted, mut undecided) = (BTreeMap::new(), BTreeMap::new());
    for ((device, work), digests) in groups {
        let Agreement::Diverged(divergence) = decide_replicas(&digests) else { continue };
        let others = digests.len() - divergence.suspects.len();
        for rank in divergence.suspects {
            let (Some(report), Some(digest)) = (reports.get(&rank), digests.get(&rank)) else { continue };
            if divergence.named {
                let reason = format!(
                    "{work}: its product ({digest:032x}) is not that of {others} other ranks with the same device; {}",
                    pace(report)
                );
                outvoted.insert(rank, reason);
            } else {
                let reason = format!("{work}: the products of {} ranks on {device} differ", digests.len());
                undecided.insert(rank, reason);
            }
        }
    }
    (outvoted, undecided)
}

/// How many times as long each rank takes for the work as the median of the ranks with the same device: only to be shown.
pub fn slowness(reports: &BTreeMap<u32, BurnInReport>) -> BTreeMap<u32, f64> {
    let mut paces: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for report in reports.values() {
        paces.entry(&report.device).or_default().push(report.gigaflops);
    }
    for pace in paces.values_mut() {
        pace.sort_by(f64::total_cmp);
    }
    let median = |device: &str| paces.get(device).and_then(|sorted| sorted.get(sorted.len() / 2)).copied();
    let ratio = |report: &BurnInReport| median(&report.device).map_or(1.0, |median| median / report.gigaflops);
    let finite = |ratio: f64| if ratio.is_finite() { ratio } else { 1.0 };
    reports.iter().map(|(rank, report)| (*rank, finite(ratio(report)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIT: Standing = Standing { has_passed: true, is_suspect: false };
    const NEW: Standing = Standing { has_passed: false, is_suspect: false };
    const SUSPECT: Standing = Standing { has_passed: true, is_suspect: true };

    #[test]
    fn a_burn_in_is_due_where_one_worker_is_new_or_a_suspect() {
        let second = Duration::from_secs(1);
        let cases = [
            (Some(1.0), Device::Cpu, vec![FIT, FIT], Duration::ZERO),
            (Some(1.0), Device::Cpu, vec![FIT, NEW], second),
            (Some(1.0), Device::Cpu, vec![SUSPECT, FIT], second),
            (None, Device::Cuda, vec![FIT, FIT], Duration::ZERO),
            (None, Device::Cuda, vec![FIT, NEW], USUAL),
            (None, Device::Cpu, vec![NEW, NEW], Duration::ZERO),
            (None, Device::Cpu, vec![NEW, SUSPECT], USUAL),
            (Some(0.0), Device::Cuda, vec![NEW, NEW], Duration::ZERO),
            (Some(0.0), Device::Cpu, vec![NEW, SUSPECT], Duration::ZERO),
            (Some(1.0), Device::Cpu, vec![], Duration::ZERO),
        ];
        for (written, device, chosen, wanted) in cases {
            assert_eq!(decide_due(written, device, &chosen), wanted, "{written:?} {device:?} {chosen:?}");
        }
    }

    fn report(digest: u128) -> BurnInReport {
        BurnInReport {
            digest,
            rounds: 412,
            wrong_rounds: 0,
            seconds: 5.0,
            gigaflops: 95.4,
            node_sum: None,
            world_sum: Some(SumCheck { seconds: 0.01, wrong_elements: 0 }),
            device: "Xeon".to_owned(),
            work: "matmul".to_owned(),
        }
    }

    fn reports(of: &[BurnInReport]) -> BTreeMap<u32, BurnInReport> {
        (0..).zip(of.iter().cloned()).collect()
    }

    fn judge(of: &[BurnInReport]) -> (Vec<u32>, bool, String) {
        match decide_burn_in(&reports(of)) {
            Outcome::Fit => (Vec::new(), false, String::new()),
            Outcome::Wrong(wrong) => (wrong.suspects.keys().copied().collect(), wrong.named, wrong.message()),
        }
    }

    fn sums(node: Option<u64>, world: u64) -> BurnInReport {
        let sum = |wrong_elements| SumCheck { seconds: 0.01, wrong_elements };
        BurnInReport { node_sum: node.map(sum), world_sum: Some(sum(world)), ..report(7) }
    }

    #[test]
    fn equal_devices_are_fit_and_a_single_one_too() {
        assert_eq!(decide_burn_in(&reports(&[report(7), report(7)])), Outcome::Fit);
        assert_eq!(decide_burn_in(&reports(&[BurnInReport { world_sum: None, ..report(7) }])), Outcome::Fit);
        assert_eq!(decide_burn_in(&BTreeMap::new()), Outcome::Fit);
    }

    #[test]
    fn who_differs_from_itself_is_named_even_alone_and_is_compared_with_nobody() {
        let flickers = BurnInReport { wrong_rounds: 3, ..report(8) };
        let reason = "matmul: 3 of 412 products differed from the first; 95 gigaflop/s over 5.0 s on Xeon".to_owned();
        assert_eq!(judge(std::slice::from_ref(&flickers)), (vec![0], true, reason.clone()));
        assert_eq!(judge(&[report(7), flickers.clone()]), (vec![1], true, reason));
        assert!(!judge(&[flickers.clone(), flickers]).1, "what all do is no device's fault");
    }

    #[test]
    fn of_devices_with_one_name_the_minority_is_named_and_of_two_neither() {
        let (suspects, named, message) = judge(&[report(7), report(0xab), report(7)]);
        assert_eq!((suspects, named), (vec![1], true));
        assert!(message.contains("000000ab) is not that of 2 other ranks with the same device; 95 gig"), "{message}");
        let undecided = "matmul: the products of 2 ranks on Xeon differ".to_owned();
        assert_eq!(judge(&[report(7), report(8)]), (vec![0, 1], false, undecided));
    }

    #[test]
    fn devices_of_different_or_unknown_names_are_not_compared() {
        let other = BurnInReport { device: "EPYC".to_owned(), ..report(8) };
        let unknown = BurnInReport { device: String::new(), ..report(9) };
        assert_eq!(judge(&[report(7), other, unknown.clone(), unknown]).0, Vec::<u32>::new());
    }

    #[test]
    fn a_sum_names_the_host_or_the_few_and_nobody_where_it_is_wrong_for_most() {
        let (right, bad) = (sums(Some(0), 0), sums(Some(2), 5));
        // Two hosts of two ranks: what is wrong on one host has spoilt the sum over all.
        let (suspects, named, message) = judge(&[sums(Some(0), 5), sums(Some(0), 5), bad.clone(), bad]);
        assert_eq!((suspects, named), (vec![2, 3], true));
        assert_eq!(message, "the sum over the ranks of its host was wrong in 2 elements (10.0 ms)");
        assert_eq!(judge(&[right.clone(), right.clone(), sums(None, 5)]).0, [2]);
        let (suspects, named, _) = judge(&[sums(None, 5), sums(None, 5), right]);
        assert_eq!((suspects, named), (vec![0, 1], false));
        let (suspects, named, _) = judge(&[sums(None, 5), sums(None, 5)]);
        assert_eq!((suspects, named), (vec![0, 1], false));
    }

    #[test]
    fn several_that_are_wrong_are_named_each_with_its_reason() {
        let flickers = BurnInReport { wrong_rounds: 3, ..report(7) };
        let (suspects, named, message) = judge(&[flickers, report(7), report(8), report(7)]);
        assert_eq!((suspects, named), (vec![0, 2], true));
        assert!(message.contains("rank 0: matmul: 3 of 412") && message.contains("; rank 2: matmul: its"), "{message}");
    }

    #[test]
    fn a_slow_device_is_slow_against_its_like_and_fit() {
        let slow = BurnInReport { gigaflops: 47.7, ..report(7) };
        let alone = BurnInReport { gigaflops: 1.0, device: "EPYC".to_owned(), ..report(9) };
        let all = reports(&[report(7), slow, report(7), alone]);
        assert_eq!(decide_burn_in(&all), Outcome::Fit);
        assert_eq!(slowness(&all).into_values().collect::<Vec<_>>(), [1.0, 2.0, 1.0, 1.0]);
        let dead = BurnInReport { gigaflops: 0.0, ..report(7) };
        assert!(slowness(&reports(&[dead])).values().all(|ratio| ratio.is_finite()), "JSON has no infinity");
    }
}
