//! Does this rank's device compute and sum rightly? Asked before anything is loaded, where the coordinator says so.
//!
//! Every rank multiplies the same two matrices again and again for the given time. Each product is compared with the first one
//! on the device, bit for bit: a device that differs from itself is wrong, whoever it belongs to. The digest of the first product
//! goes to the coordinator, which compares it among devices of one kind. Then the ranks of this host, and all ranks, sum a vector
//! whose sum is known. Nothing is judged here: a rank whose device is wrong reports that and goes on until it is stopped, since
//! only the coordinator sees what the others say.
//!
//! That a healthy device repeats a product bit for bit is what cuBLAS promises of one GPU model, one stream and one version, and what
//! MKL and oneDNN do at one number of threads, which all ranks of a job have in common.
//!
//! The matrices are integers of a formula, rounded at most once, so all devices start from the same bits; no generator and no
//! global setting is touched (P4).

use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};
use trainctl_spec::report::{BurnInReport, SumCheck};
use trainctl_store::fault::{self, FailPoint};

use crate::Error;
use crate::job::TrainJob;
use crate::parallel::World;
use crate::pulse::Collective;

/// Rows and columns of the matrices on a CPU: a product takes some 10 ms, and does not fit into a core's own caches.
const SIZE_CPU: i64 = 1024;
/// The same on a GPU, which smaller ones do not fill.
const SIZE_CUDA: i64 = 8192;

/// Elements of the vector that is summed: 4 MiB.
const SUMMED_CPU: i64 = 1 << 20;
/// The same on a GPU: 128 MiB, with which links between them are busy for some milliseconds.
const SUMMED_CUDA: i64 = 32 << 20;
/// The vector's elements are at most this; with [`OFFSETS`], sums over 65,536 ranks (the most that a spec allows) stay below 2²⁴,
/// hence exact in fp32 in whatever order they are made.
const VALUES: i64 = 241;
/// What ranks add to it, so that two of them that are taken for each other are noticed.
const OFFSETS: i64 = 13;

/// Burns in this rank's device for `job.burn_in` and the links to the other ranks once. Every rank of the generation calls it, before
/// the rendezvous store is sealed.
///
/// # Errors
/// [`Error::Collective`] when a peer was lost; libtorch's. Wrong results are none.
pub(crate) fn burn_in(world: &World, job: &TrainJob, kind: Kind, device: Device) -> Result<BurnInReport, Error> {
    let others: Vec<usize> = job.node_ranks.iter().map(|rank| *rank as usize).collect();
    // Where all ranks share a host its sum is the sum over all. Made first, so that the ranks begin together.
    let is_group = others.len() > 1 && others.len() < job.world_size as usize;
    let node = match others.first() {
        Some(first) if is_group => world.subgroup(&format!("burn-in-{first}"), &others, job.start_step)?,
        _ => None,
    };
    tch::no_grad(|| {
        let products = multiply(job.burn_in, kind, device)?;
        let sum = |group: Option<&_>, ranks: &mut dyn Iterator<Item = i64>, what| {
            let mine = i64::from(job.rank.0);
            check_sum(&Summed { mine, ranks: ranks.collect() }, device, |vector| {
                world.sum_timed(group, vector, what, job.start_step)
            })
        };
        let node_sum = match &node {
            Some(group) => {
                let mut ranks = job.node_ranks.iter().map(|rank| i64::from(*rank));
                Some(sum(Some(group), &mut ranks, Collective::NodeSum)?)
            }
            None => {
                world.pass_by(Collective::NodeSum);
                None
            }
        };
        let mut all = 0..i64::from(job.world_size);
        let world_sum = if job.world_size > 1 { Some(sum(None, &mut all, Collective::WorldSum)?) } else { None };
        let Products { size, digest, rounds, wrong_rounds, seconds } = products;
        let operations = 2.0 * (size as f64).powi(3) * rounds as f64;
        let precision = if kind == Kind::Float { "fp32" } else { "bf16" };
        Ok(BurnInReport {
            digest,
            rounds,
            wrong_rounds,
            seconds,
            gigaflops: operations / seconds.max(1e-9) / 1e9,
            node_sum,
            world_sum,
            device: device_name(device),
            work: format!("matmul of {size}×{size} in {precision}"),
        })
    })
}

/// What came of the products.
struct Products {
    size: i64,
    /// First 16 bytes of blake3 over the first product's bytes, little-endian.
    digest: u128,
    rounds: u64,
    wrong_rounds: u64,
    seconds: f64,
}

/// Makes one product, then as many more as `time` allows, at least one.
fn multiply(time: Duration, kind: Kind, device: Device) -> Result<Products, Error> {
    let size = if device.is_cuda() { SIZE_CUDA } else { SIZE_CPU };
    let (a, b) = (matrix(size, 1, kind, device)?, matrix(size, 2, kind, device)?);
    let mut first = a.f_mm(&b)?;
    may_flip(&mut first)?;
    let host = first.f_to(Device::Cpu)?.f_contiguous()?;
    let hash = blake3::hash(trainctl_collective::bytes(&host).map_err(Error::Shim)?);
    let digest = u128::from_le_bytes(hash.as_bytes().first_chunk().copied().unwrap_or_default());
    drop(host);

    let mut product = first.f_empty_like()?;
    let (mut rounds, mut wrong_rounds) = (0, 0);
    let started = Instant::now();
    while rounds == 0 || started.elapsed() < time {
        drop(a.f_mm_out(&product, &b)?);
        may_flip(&mut product)?;
        rounds += 1;
        // The answer comes from the device, so its queue is empty after each round and the time is its own.
        wrong_rounds += u64::from(!bits(&product)?.f_equal(&bits(&first)?)?);
    }
    Ok(Products { size, digest, rounds, wrong_rounds, seconds: started.elapsed().as_secs_f64() })
}

/// A matrix with elements k / 4096 − 1, k of 13 bits: the top ones of i · 2654435761 (Knuth's multiplicative hash) + an offset.
/// Exact in fp32; bf16 rounds each element once.
fn matrix(size: i64, number: i64, kind: Kind, device: Device) -> Result<Tensor, Error> {
    let index = Tensor::f_arange(size * size, (Kind::Int64, device))?;
    let mut word = index.f_mul_scalar(2_654_435_761_i64)?.f_add_scalar(number * 0x1234_5677)?;
    drop(word.f_remainder_(1_i64 << 32)?);
    drop(word.f_bitwise_right_shift_tensor_scalar_(19_i64)?);
    let elements = word.f_to_kind(Kind::Float)?.f_div_scalar(4096.0)?.f_sub_scalar(1.0)?;
    Ok(elements.f_to_kind(kind)?.f_view([size, size])?)
}

/// The same memory as integers, which are equal only where all bits are: NaN and the sign of zero included.
fn bits(tensor: &Tensor) -> Result<Tensor, Error> {
    let kind = if tensor.kind().elt_size_in_bytes() == 2 { Kind::Int16 } else { Kind::Int };
    Ok(tensor.f_view_dtype(kind)?)
}

/// Does what a device that miscalculates does, for tests: another last bit of one element.
fn may_flip(product: &mut Tensor) -> Result<(), Error> {
    let flips = fault::flips(FailPoint::BURN_IN_PRODUCT);
    if flips.map_err(|error| Error::Internal(format!("burn-in: {error}")))? {
        let mut element = product.f_view([-1])?.f_narrow(0, product.numel() as i64 / 2, 1)?;
        let mut host = Tensor::f_empty([1], (element.kind(), Device::Cpu))?;
        host.f_copy_(&element)?;
        trainctl_collective::bytes_mut(&mut host).map_err(Error::Shim)?[0] ^= 1;
        element.f_copy_(&host)?;
    }
    Ok(())
}

/// Who sums.
struct Summed {
    mine: i64,
    ranks: Vec<i64>,
}

/// Sums this rank's vector by `all_reduce` and counts the elements that are wrong. Element i of rank r is i mod 241 + r mod 13.
fn check_sum(
    of: &Summed,
    device: Device,
    all_reduce: impl FnOnce(&Tensor) -> Result<Duration, Error>,
) -> Result<SumCheck, Error> {
    let elements = if device.is_cuda() { SUMMED_CUDA } else { SUMMED_CPU };
    let values = Tensor::f_arange(elements, (Kind::Int64, device))?.f_remainder(VALUES)?.f_to_kind(Kind::Float)?;
    let vector = values.f_add_scalar(of.mine % OFFSETS)?;
    let took = all_reduce(&vector)?;
    let offsets: i64 = of.ranks.iter().map(|rank| rank % OFFSETS).sum();
    let wanted = values.f_mul_scalar(of.ranks.len() as i64)?.f_add_scalar(offsets)?;
    let wrong = i64::try_from(&vector.f_ne_tensor(&wanted)?.f_sum(Kind::Int64)?)?;
    Ok(SumCheck { seconds: took.as_secs_f64(), wrong_elements: wrong.unsigned_abs() })
}

/// What the device is called; empty where the system does not say. Products of devices of one name have the same bits.
fn device_name(device: Device) -> String {
    if device.is_cuda() {
        let Ok(gpus) = std::fs::read_dir("/proc/driver/nvidia/gpus") else { return String::new() };
        let texts = gpus.flatten().map(|gpu| std::fs::read_to_string(gpu.path().join("information")));
        let mut names: Vec<String> = texts.flatten().filter_map(|text| value(&text, "Model")).collect();
        names.sort_unstable();
        names.dedup();
        // Of a host with GPUs of several models it is not known which one this is: not compared.
        if let [name] = &mut names[..] { std::mem::take(name) } else { String::new() }
    } else {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        value(&text, "model name").unwrap_or_default()
    }
}

/// The value of the first line `key : value`.
fn value(text: &str, key: &str) -> Option<String> {
    let found = text.lines().filter_map(|line| line.split_once(':')).find(|(name, _)| name.trim() == key);
    found.map(|(_, value)| value.split_whitespace().collect::<Vec<_>>().join(" ")).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrices_are_the_formula_in_every_kind() {
        let size = 64;
        let element = |i: u64, number: u64| {
            let word = (i * 2_654_435_761 + number * 0x1234_5677) % (1 << 32);
            (word >> 19) as f32 / 4096.0 - 1.0
        };
        for number in [1, 2] {
            let made = matrix(size, number, Kind::Float, Device::Cpu).unwrap();
            let wanted: Vec<f32> = (0..size.pow(2)).map(|i| element(i as u64, number as u64)).collect();
            assert_eq!(Vec::<f32>::try_from(made.view([-1])).unwrap(), wanted);
            assert!(wanted.iter().all(|x| (-1.0..1.0).contains(x)));
            let mean = wanted.iter().sum::<f32>() / wanted.len() as f32;
            assert!(mean.abs() < 0.05, "{mean}");
            let rounded = matrix(size, number, Kind::BFloat16, Device::Cpu).unwrap();
            assert!(rounded.equal(&made.to_kind(Kind::BFloat16)));
        }
    }

    #[test]
    fn products_repeat_bit_for_bit_and_have_one_digest() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let (first, second) = (
                multiply(Duration::ZERO, kind, Device::Cpu).unwrap(),
                multiply(Duration::from_millis(1), kind, Device::Cpu).unwrap(),
            );
            assert_eq!((first.rounds, first.wrong_rounds, second.wrong_rounds), (1, 0, 0));
            assert_eq!(first.digest, second.digest);
            assert_ne!(first.digest, 0);
        }
    }

    #[test]
    fn bits_tell_apart_what_numbers_do_not() {
        let (plus, minus) = (Tensor::from_slice(&[0.0_f32]), Tensor::from_slice(&[-0.0_f32]));
        assert!(plus.equal(&minus) && !bits(&plus).unwrap().equal(&bits(&minus).unwrap()));
        let nan = Tensor::from_slice(&[f32::NAN]);
        assert!(!nan.equal(&nan) && bits(&nan).unwrap().equal(&bits(&nan).unwrap()));
    }

    #[test]
    fn a_sum_is_exact_for_the_largest_world_and_each_wrong_element_counts() {
        let ranks: Vec<i64> = (0..65_536).collect();
        let offsets: i64 = ranks.iter().map(|rank| rank % OFFSETS).sum();
        assert!((VALUES - 1) * 65_536 + offsets < 1 << 24);
        let of = Summed { mine: 20, ranks: vec![20, 21, 3] };
        let all_reduce = |vector: &Tensor, wrong: i64| {
            // The others' vectors by hand: 21 mod 13 and 3 mod 13.
            let index = Tensor::arange(SUMMED_CPU, (Kind::Int64, Device::Cpu)).remainder(VALUES).to_kind(Kind::Float);
            let mut vector = vector.shallow_clone();
            drop(vector.f_add_(&(index * 2.0 + 8.0 + 3.0)).unwrap());
            drop(vector.narrow(0, 5, wrong).f_add_scalar_(1.0).unwrap());
            Ok(Duration::from_millis(250))
        };
        let check = |wrong| check_sum(&of, Device::Cpu, |vector| all_reduce(vector, wrong)).unwrap();
        assert_eq!(check(0), SumCheck { seconds: 0.25, wrong_elements: 0 });
        assert_eq!(check(3).wrong_elements, 3);
    }

    #[test]
    fn a_device_is_called_what_the_system_calls_it() {
        let text = "processor\t: 0\nmodel name\t: Some(R)  CPU @ 2.0GHz\nprocessor\t: 1\nmodel name\t: other\n";
        assert_eq!(value(text, "model name").as_deref(), Some("Some(R) CPU @ 2.0GHz"));
        assert_eq!(value("Model: \t\t NVIDIA H200\nIRQ: 5\n", "Model").as_deref(), Some("NVIDIA H200"));
        assert_eq!((value(text, "Model"), value("Model:  \n", "Model")), (None, None));
    }
}
