use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;
use safetensors::SafeTensors;
use serde_json::Value;

use super::*;
use crate::Unfenced;
use crate::layout::{Section, ShardName};
use crate::manifest::{Manifest, tests::example};
use crate::shard::{ShardWriter, Slice, TensorView};

const CONFIG_KEYS: &str = "{model_type: gpt2, n_layer: 2, n_head: 2, n_embd: 8, n_positions: 16, vocab_size: 40}";
const NAME: CheckpointName = CheckpointName { epoch: 0, step: 9 };

fn model() -> Architecture {
    let config = serde_json::json!({
        "model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 40
    });
    Architecture::from_config(config.as_object().unwrap()).unwrap()
}

/// A value for each element of each tensor that bf16 cannot hold.
fn value(tensor: usize, element: u64) -> f32 {
    (tensor as f32 + 1.0) * 0.01 + element as f32 * 1.000_1e-3
}

struct Place {
    dir: tempfile::TempDir,
    store: CheckpointStore,
}

impl Place {
    /// A checkpoint of two ranks; the token embedding is cut between them.
    async fn new(bf16_run: bool) -> Self {
        Self::of(bf16_run, |_, _, value| value).await
    }

    async fn of(bf16_run: bool, change: fn(usize, u64, f32) -> f32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        std::fs::create_dir_all(dir.path().join("tokenizer")).unwrap();
        let tokenizer = r#"{"added_tokens": [{"id": 0, "content": "<|endoftext|>"}]}"#;
        std::fs::write(dir.path().join("tokenizer/tokenizer.json"), tokenizer).unwrap();
        let writer = ShardWriter::new(&root, NAME);
        let mut files = Vec::new();
        for (section, wide) in [(Section::Model, !bf16_run), (Section::Optim, true)] {
            for rank in 0..2 {
                let pieces = pieces(section, rank, wide, change);
                let views: Vec<TensorView<'_>> = pieces
                    .iter()
                    .map(|(name, shape, bytes, slice)| TensorView {
                        name,
                        dtype: if wide { "F32" } else { "BF16" },
                        shape,
                        bytes,
                        slice: slice.clone(),
                    })
                    .collect();
                let path = ShardName { section, rank, world_size: 2, generation: 2 };
                files.push(writer.write_safetensors(&path.to_string(), &views, &[]).unwrap());
            }
        }
        let yaml = format!(
            "name: tiny\nrun_dir: {}\nmodel: {{config: {CONFIG_KEYS}}}\n\
             dataset: {{paths: [{{prefix: text}}], seq_length: 16, tokenizer: {}}}\nstep_scheduler: {{max_steps: 10}}\n",
            root.display(),
            dir.path().join("tokenizer").display(),
        );
        let store = CheckpointStore::open(&root);
        store.commit(&Unfenced, Manifest { files, ..example(9, None) }, &yaml).await.unwrap();
        Self { dir, store }
    }

    async fn export(&self, to: &str, options: &ExportOptions) -> Result<Exported, ExportError> {
        self.store.export(NAME, None, &self.dir.path().join(to), options, |_, _| ControlFlow::Continue(())).await
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap()
    }

    /// Names in the folder of the targets.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path()).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

type PieceOf = (String, Vec<u64>, Vec<u8>, Option<Slice>);

fn pieces(section: Section, rank: u32, wide: bool, change: fn(usize, u64, f32) -> f32) -> Vec<PieceOf> {
    let mut pieces = Vec::new();
    for (index, parameter) in model().parameters().into_iter().enumerate() {
        let values: Vec<f32> = (0..parameter.elements()).map(|e| change(index, e, value(index, e))).collect();
        let bytes = |values: &[f32]| -> Vec<u8> {
            match wide {
                true => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                false => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            }
        };
        let name = match section {
            Section::Model => parameter.name.clone(),
            Section::Optim => format!("master.{}", parameter.name),
        };
        if index == 0 {
            // Columns: the rows of each half are strewn over the whole.
            let [rows, columns] = parameter.shape[..] else { unreachable!("an embedding is a matrix") };
            let half = columns / 2;
            let from = u64::from(rank) * half;
            let mine: Vec<f32> = values
                .chunks(columns as usize)
                .flat_map(|row| row[from as usize..(from + half) as usize].to_vec())
                .collect();
            let slice = Slice { shape: parameter.shape.clone(), offset: vec![0, from] };
            pieces.push((name, vec![rows, half], bytes(&mine), Some(slice)));
        } else if index as u32 % 2 == rank {
            pieces.push((name, parameter.shape.clone(), bytes(&values), None));
        }
    }
    pieces
}

/// Reads an export as `transformers` does and compares it with `expected(tensor, element)`, bit for bit.
fn check_weights(dir: &Path, dtype: safetensors::Dtype, expected: impl Fn(usize, u64) -> Vec<u8>) {
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    let contents: Vec<Vec<u8>> = files.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let parsed: Vec<SafeTensors<'_>> = contents.iter().map(|bytes| SafeTensors::deserialize(bytes).unwrap()).collect();
    let mut found = 0;
    for (index, parameter) in model().parameters().iter().enumerate() {
        let tensor = parsed.iter().find_map(|file| file.tensor(&parameter.name).ok()).unwrap();
        let shape: Vec<u64> = tensor.shape().iter().map(|n| *n as u64).collect();
        assert_eq!((tensor.dtype(), &shape), (dtype, &parameter.shape), "{}", parameter.name);
        let bytes: Vec<u8> = (0..parameter.elements()).flat_map(|element| expected(index, element)).collect();
        assert_eq!(tensor.data(), bytes, "{}", parameter.name);
        found += 1;
    }
    assert_eq!(parsed.iter().map(SafeTensors::len).sum::<usize>(), found, "no tensor more");
}

fn wide(tensor: usize, element: u64) -> Vec<u8> {
    value(tensor, element).to_le_bytes().to_vec()
}

fn narrow(tensor: usize, element: u64) -> Vec<u8> {
    bf16::from_f32(value(tensor, element)).to_le_bytes().to_vec()
}

#[tokio::test]
async fn an_export_holds_every_weight_bit_for_bit_and_what_transformers_needs() {
    let place = Place::new(false).await;
    let exported = place.export("out", &ExportOptions::default()).await.unwrap();
    check_weights(&place.path("out"), safetensors::Dtype::F32, wide);
    let expected =
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(exported.files, expected);
    assert_eq!((exported.parameters, exported.bytes), (model().parameter_count(), model().parameter_count() * 4));
    assert_eq!(exported.warnings, Vec::<String>::new());
    let config = place.json("out/config.json");
    assert_eq!((&config["architectures"][0], &config["dtype"]), (&"GPT2LMHeadModel".into(), &"float32".into()));
    assert_eq!(config["eos_token_id"], 0);
    assert!(place.store.pins().await.unwrap().is_empty(), "the pin is gone");
    let bytes = std::fs::read(place.path("out/model.safetensors")).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
}

#[tokio::test]
async fn casts_take_the_better_source() {
    let place = Place::new(true).await;
    for (to, dtype, torch) in [
        ("as-stored", None, "bfloat16"),
        ("fp32", Some(Dtype::F32), "float32"),
        ("bf16", Some(Dtype::Bf16), "bfloat16"),
    ] {
        let exported = place.export(to, &ExportOptions { dtype, ..ExportOptions::default() }).await.unwrap();
        assert_eq!(exported.dtype, torch);
        match dtype {
            Some(Dtype::F32) => check_weights(&place.path(to), safetensors::Dtype::F32, wide),
            _ => check_weights(&place.path(to), safetensors::Dtype::BF16, narrow),
        }
    }
    let fp32_run = Place::new(false).await;
    fp32_run.export("bf16", &ExportOptions { dtype: Some(Dtype::Bf16), ..ExportOptions::default() }).await.unwrap();
    check_weights(&fp32_run.path("bf16"), safetensors::Dtype::BF16, narrow);
}

#[tokio::test]
async fn a_small_limit_makes_many_files_and_an_index_that_names_them() {
    let place = Place::new(false).await;
    let options = ExportOptions { max_shard_bytes: 1000, ..ExportOptions::default() };
    let exported = place.export("out", &options).await.unwrap();
    check_weights(&place.path("out"), safetensors::Dtype::F32, wide);
    let index = place.json("out/model.safetensors.index.json");
    assert_eq!(index["metadata"]["total_size"], exported.bytes);
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), exported.tensors);
    let mut files: Vec<&str> = map.values().map(|file| file.as_str().unwrap()).collect();
    files.sort_unstable();
    files.dedup();
    let count = files.len();
    assert!(count > 5 && files[0] == format!("model-00001-of-{count:05}.safetensors"), "{files:?}");
    for (name, file) in map {
        let bytes = std::fs::read(place.path("out").join(file.as_str().unwrap())).unwrap();
        let parsed = SafeTensors::deserialize(&bytes).unwrap();
        assert!(parsed.tensor(name).is_ok(), "{name} is not in {file}");
        let payload: usize = parsed.iter().map(|(_, tensor)| tensor.data().len()).sum();
        assert!(payload <= 1000 || parsed.len() == 1, "{file} has {payload} bytes in {} tensors", parsed.len());
    }
}

#[tokio::test]
async fn fp16_refuses_what_becomes_infinite_and_counts_what_becomes_zero() {
    let options = ExportOptions { dtype: Some(Dtype::F16), ..ExportOptions::default() };
    let large = Place::of(false, |tensor, element, value| if (tensor, element) == (3, 5) { 1e5 } else { value }).await;
    let error = large.export("out", &options).await.unwrap_err();
    assert!(matches!(&error, ExportError::Overflow { value, .. } if *value == 1e5), "{error}");
    assert!(error.to_string().contains(&model().parameters()[3].name) && error.to_string().contains("bf16"), "{error}");
    assert_eq!(large.names(), ["run", "tokenizer"], "nothing stays");
    let small = Place::of(false, |tensor, element, value| if (tensor, element) == (3, 5) { 1e-9 } else { value }).await;
    let exported = small.export("out", &options).await.unwrap();
    assert!(exported.warnings[0].starts_with("1 values"), "{:?}", exported.warnings);
}

#[tokio::test]
async fn refusals_come_before_anything_is_written() {
    let place = Place::new(false).await;
    std::fs::create_dir(place.path("full")).unwrap();
    std::fs::write(place.path("full/notes.txt"), "mine").unwrap();
    std::fs::write(place.path("file"), "mine").unwrap();
    let before = place.names();
    for (to, said) in [("full", "not empty"), ("file", "no directory")] {
        let error = place.export(to, &ExportOptions::default()).await.unwrap_err().to_string();
        assert!(error.contains(to) && error.contains(said), "{error}");
    }
    let other = ExportOptions { tokenizer: Some(place.path("gone")), ..ExportOptions::default() };
    assert!(matches!(place.export("out", &other).await.unwrap_err(), ExportError::Tokenizer { .. }));
    let to = place.path("out");
    let unknown =
        place.store.export(CheckpointName { epoch: 0, step: 8 }, None, &to, &other, |_, _| ControlFlow::Continue(()));
    assert!(matches!(unknown.await.unwrap_err(), ExportError::Store(Error::NotCommitted { .. })));
    assert_eq!(place.names(), before);
    assert!(place.store.pins().await.unwrap().is_empty());
    std::fs::create_dir(place.path("empty")).unwrap();
    place.export("empty", &ExportOptions::default()).await.unwrap();
}

#[tokio::test]
async fn a_damaged_checkpoint_gives_no_export() {
    let place = Place::new(false).await;
    let shard = ShardName { section: Section::Model, rank: 1, world_size: 2, generation: 2 };
    let path = place.store.path(NAME).join(shard.to_string());
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = place.export("out", &ExportOptions::default()).await.unwrap_err();
    assert!(matches!(&error, ExportError::Store(Error::Damaged { .. })), "{error}");
    assert_eq!(place.names(), ["run", "tokenizer"]);
}

#[tokio::test]
async fn a_tokenizer_that_is_gone_is_a_warning_and_a_foreign_tensor_is_listed() {
    let place = Place::new(false).await;
    std::fs::remove_dir_all(place.path("tokenizer")).unwrap();
    let exported = place.export("out", &ExportOptions::default()).await.unwrap();
    assert!(exported.warnings[0].contains("is gone"), "{:?}", exported.warnings);
    assert_eq!(place.json("out/config.json")["eos_token_id"], Value::Null, "50256 is no id of 40");

    let found = crate::shard::TensorInfo { dtype: "F32".into(), shape: vec![3] };
    let error = Plan::new(&model(), [("model/x", &found)].into_iter(), None, 1).unwrap_err().to_string();
    for said in ["model/x [3] is no tensor", "model/transformer.wte.weight [40, 8] is missing"] {
        assert!(error.contains(said), "{error}");
    }
}

#[tokio::test]
async fn any_size_of_the_batches_gives_the_same_bytes() {
    let place = Place::new(true).await;
    let reader = place.store.reader(NAME, None).unwrap();
    for batch_bytes in [1, 36, 100, 1000, 4096] {
        let (to, options) = (place.path("out"), ExportOptions { dtype: Some(Dtype::F32), ..ExportOptions::default() });
        export_by(&reader, &to, &options, batch_bytes, &mut |_, _| ControlFlow::Continue(())).unwrap();
        check_weights(&to, safetensors::Dtype::F32, wide);
        std::fs::remove_dir_all(&to).unwrap();
    }
}

#[tokio::test]
async fn an_export_that_is_stopped_on_its_way_leaves_nothing() {
    let place = Place::new(true).await;
    let stop = |done, _| if done > 1000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let stopped = place.store.export(NAME, None, &place.path("at/out"), &ExportOptions::default(), stop).await;
    assert!(matches!(stopped, Err(ExportError::Stopped)), "{stopped:?}");
    assert_eq!(std::fs::read_dir(place.path("at")).unwrap().count(), 0);
    assert!(place.store.pins().await.unwrap().is_empty());
}

#[tokio::test]
async fn progress_ends_at_the_bytes_read() {
    let place = Place::new(true).await;
    let seen = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&seen);
    let options = ExportOptions { dtype: Some(Dtype::F32), ..ExportOptions::default() };
    let progress = move |done: u64, total: u64| {
        assert!(done <= total);
        count.fetch_max(done, Ordering::Relaxed);
        ControlFlow::Continue(())
    };
    place.store.export(NAME, None, &place.path("out"), &options, progress).await.unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), model().parameter_count() * 4, "the masters");
}
