//! The logits that this engine computes, in fp32 and without dropout, for the comparison with `transformers`
//! (`tests/oracle/oracle.py`).
//!
//! `logits --from DIR --tokens ids.json --out logits.safetensors`: DIR is a checkpoint's directory in its run, or a Hugging
//! Face directory. ids.json is a list of equally long lists of token ids, [B][T]; the output's `logits` is [B, T, V].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};
use trainctl_engine::checkpoint;
use trainctl_engine::executor::{Batch, Executor};
use trainctl_engine::head::Head;
use trainctl_engine::model::Gpt2;
use trainctl_engine::params::Parameters;
use trainctl_spec::job::{JobSpec, LossFn, ModelConfigSource};
use trainctl_spec::model::Architecture;
use trainctl_store::layout::CheckpointName;
use trainctl_store::shard::ShardReader;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut options: BTreeMap<String, PathBuf> = BTreeMap::new();
    let mut words = std::env::args().skip(1);
    while let (Some(option), Some(value)) = (words.next(), words.next()) {
        options.insert(option, value.into());
    }
    let [Some(from), Some(tokens), Some(out)] = ["--from", "--tokens", "--out"].map(|name| options.get(name)) else {
        return Err("usage: logits --from DIR --tokens ids.json --out logits.safetensors".into());
    };
    let rows: Vec<Vec<i64>> = serde_json::from_slice(&std::fs::read(tokens)?)?;
    let length = rows.first().map_or(0, Vec::len) as i64;
    let ids = Tensor::f_from_slice(&rows.concat())?.f_view([rows.len() as i64, length])?;

    let (executor, params) =
        if from.join("manifest.json").exists() { of_checkpoint(from, length)? } else { of_hugging_face(from, length)? };
    let batch = Batch { targets: ids.f_reshape([-1])?, ids, first_sequence: 0 };
    let hidden = executor.hidden(&params, &batch)?;
    let (block, index) = executor.model().head_place();
    let logits = tch::no_grad(|| hidden.f_matmul(&params.block(block)[index].f_tr()?))?;
    Tensor::write_safetensors(&[("logits", logits)], out)?;
    Ok(())
}

fn model(architecture: &Architecture, seq_length: i64) -> Result<(Executor, Parameters), Failure> {
    let known = architecture.parameters();
    let Architecture::Gpt2(config) = architecture;
    let model = Gpt2::new(config.clone(), seq_length, Device::Cpu)?;
    let params = Parameters::zeros(&model.block_names(), &known, Kind::Float, Device::Cpu)?;
    Ok((Executor::new(model, Head::new(LossFn::Chunked), false), params))
}

fn of_hugging_face(dir: &Path, seq_length: i64) -> Result<(Executor, Parameters), Failure> {
    let config: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&std::fs::read(dir.join("config.json"))?)?;
    let architecture = Architecture::of_weights(&config)?;
    let (executor, mut params) = model(&architecture, seq_length)?;
    checkpoint::load_pretrained(dir, &architecture, &mut params)?;
    Ok((executor, params))
}

fn of_checkpoint(dir: &Path, seq_length: i64) -> Result<(Executor, Parameters), Failure> {
    let (Some(root), Some(name)) = (dir.parent(), dir.file_name().and_then(|name| name.to_str())) else {
        return Err(format!("{} is no checkpoint's directory", dir.display()).into());
    };
    let reader = ShardReader::open(root, name.parse::<CheckpointName>()?, None)?;
    let spec = reader.read_file("config.yaml")?.ok_or("the checkpoint has no config.yaml")?;
    let spec = JobSpec::from_yaml(std::str::from_utf8(&spec)?)?;
    let ModelConfigSource::Inline(config) = &spec.model.config else {
        return Err("config.yaml does not hold the model's config".into());
    };
    let (executor, mut params) = model(&Architecture::from_config(config)?, seq_length)?;
    let names: Vec<String> = params.entries().iter().map(|entry| entry.name.clone()).collect();
    for (name, weight) in names.iter().zip(params.masters_mut()) {
        let mut bytes = vec![0; weight.numel() * 4];
        reader.read_tensor(&format!("model/{name}"), &mut bytes)?;
        trainctl_collective::copy_from_bytes(weight, &bytes)?;
    }
    params.refresh()?;
    Ok((executor, params))
}
