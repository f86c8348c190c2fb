//! Committed checkpoints without a training: the real store's files, of any size.

use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use trainctl_spec::Architecture;
use trainctl_spec::report::{SaveKind, ShardFile};
use trainctl_spec::start::DataPhase;
use trainctl_store::layout::{Section, ShardName};
use trainctl_store::manifest::{FORMAT, Metrics};
use trainctl_store::shard::{ShardWriter, TensorView};
use trainctl_store::{CheckpointName, CheckpointStore, Location, Manifest, Unfenced};

/// A GPT-2 and the run that might have trained it.
#[derive(Clone, Debug)]
pub struct Synthetic {
    /// Run directory.
    pub run_dir: PathBuf,
    /// Rows of the token embedding.
    pub vocabulary: u64,
    /// Layers.
    pub layers: u64,
    /// Width.
    pub width: u64,
    /// bf16 weights with fp32 masters; otherwise fp32 weights alone.
    pub bf16: bool,
    /// `dataset.tokenizer`, if there is one.
    pub tokenizer: Option<PathBuf>,
    /// `checkpoint.checkpoint_dir`, a directory.
    pub checkpoint_dir: Option<PathBuf>,
}

impl Synthetic {
    /// 15,000 parameters.
    pub fn tiny(run_dir: impl Into<PathBuf>) -> Self {
        Self {
            run_dir: run_dir.into(),
            vocabulary: 300,
            layers: 1,
            width: 32,
            bf16: false,
            tokenizer: None,
            checkpoint_dir: None,
        }
    }

    /// About `units` × 60 MB of fp32 weights, more than half of it in one tensor.
    pub fn large(run_dir: impl Into<PathBuf>, units: u64) -> Self {
        Self { vocabulary: 16_384 * units, layers: 2 * units, width: 512, ..Self::tiny(run_dir) }
    }

    /// The architecture.
    ///
    /// # Panics
    /// If it is none.
    pub fn model(&self) -> Architecture {
        let config: serde_json::Value = serde_json::json!({
            "model_type": "gpt2", "vocab_size": self.vocabulary, "n_layer": self.layers, "n_embd": self.width,
            "n_head": 4, "n_positions": 64,
        });
        Architecture::from_config(config.as_object().unwrap()).unwrap()
    }

    /// The resolved spec.
    pub fn spec(&self) -> String {
        let Self { run_dir, vocabulary, layers, width, bf16, tokenizer, checkpoint_dir } = self;
        let elsewhere =
            checkpoint_dir.as_ref().map(|dir| format!(", checkpoint_dir: {}", dir.display())).unwrap_or_default();
        let precision = if *bf16 { "bf16" } else { "fp32" };
        let tokenizer = tokenizer.as_ref().map(|path| format!(", tokenizer: {}", path.display())).unwrap_or_default();
        format!(
            "name: synthetic\nrun_dir: {}\nprecision: {precision}\nmodel:\n  config: {{model_type: gpt2, vocab_size: \
             {vocabulary}, n_layer: {layers}, n_embd: {width}, n_head: 4, n_positions: 64}}\ndataset: {{paths: [{{prefix: \
             text}}], seq_length: 64{tokenizer}}}\nstep_scheduler: {{max_steps: 1000}}\ncheckpoint: \
             {{max_recent_checkpoints: 2{elsewhere}}}\n",
            run_dir.display()
        )
    }

    /// Commits a checkpoint at zero-based `step` whose weights follow from `seed`, and moves the pointers.
    ///
    /// # Panics
    /// If it cannot.
    pub fn commit(&self, step: u64, seed: u64, val_loss: Option<f64>) -> CheckpointName {
        let store = self.store();
        let name = CheckpointName { epoch: 0, step };
        let files = self.write(store.root(), name, seed, self.bf16);
        self.finish(&store, name, files, SaveKind::Full, val_loss)
    }

    /// Commits a weights-only checkpoint: bf16.
    ///
    /// # Panics
    /// If it cannot.
    pub fn commit_weights(&self, step: u64, seed: u64) -> CheckpointName {
        let store = self.store().weights();
        let name = CheckpointName { epoch: 0, step };
        let mut files = self.write(store.root(), name, seed, true);
        files.retain(|file| file.path.starts_with("model/"));
        self.finish(&store, name, files, SaveKind::Weights, None)
    }

    fn store(&self) -> CheckpointStore {
        let place = self.checkpoint_dir.as_ref().unwrap_or(&self.run_dir);
        CheckpointStore::open_at(&Location::Directory(place.clone()), self.run_dir.join("control")).unwrap()
    }

    fn finish(
        &self,
        store: &CheckpointStore,
        name: CheckpointName,
        files: Vec<ShardFile>,
        kind: SaveKind,
        val_loss: Option<f64>,
    ) -> CheckpointName {
        let draft = Manifest {
            format: FORMAT,
            name,
            job: "j-synthetic".into(),
            generation: 1,
            term: 1,
            step: name.step,
            epoch: name.epoch,
            consumed_samples: (name.step + 1) * 8,
            world_size: 2,
            mesh: vec![("dp_replicate".into(), 2)],
            skipped: vec![],
            metrics: Metrics {
                train_loss: Some(3.5),
                val_losses: val_loss.map(|loss| ("default".to_owned(), Some(loss))).into_iter().collect(),
            },
            state_hash: "00".repeat(32),
            spec_hash: String::new(),
            max_steps: 1000,
            until_step: None,
            started_from: None,
            kind,
            parent: None,
            phase: DataPhase::default(),
            corpora: [("text".to_owned(), (name.step + 1) * 8)].into(),
            created_at: String::new(),
            files,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            store.commit(&Unfenced, draft, &self.spec()).await.unwrap();
            if kind == SaveKind::Full {
                store.repair_pointers(&Unfenced, "default").await.unwrap();
            }
        });
        std::fs::create_dir_all(&self.run_dir).unwrap();
        std::fs::write(self.run_dir.join("job.yaml"), self.spec()).unwrap();
        name
    }

    /// Two ranks' shards; each has every other tensor.
    fn write(&self, root: &Path, name: CheckpointName, seed: u64, bf16: bool) -> Vec<ShardFile> {
        let writer = ShardWriter::new(root, name);
        let parameters = self.model().parameters();
        let mut files = Vec::new();
        let sections: &[(Section, &str)] =
            if bf16 { &[(Section::Model, ""), (Section::Optim, "master.")] } else { &[(Section::Model, "")] };
        for (section, prefix) in sections {
            let narrow = bf16 && *section == Section::Model;
            for rank in 0..2_u32 {
                let mine: Vec<_> =
                    parameters.iter().enumerate().filter(|(index, _)| *index as u32 % 2 == rank).collect();
                let names: Vec<String> = mine.iter().map(|(_, p)| format!("{prefix}{}", p.name)).collect();
                let bytes: Vec<Vec<u8>> =
                    mine.iter().map(|(index, p)| values(seed ^ *index as u64, p.elements(), narrow)).collect();
                let views: Vec<TensorView<'_>> = mine
                    .iter()
                    .zip(&names)
                    .zip(&bytes)
                    .map(|(((_, p), name), bytes)| TensorView {
                        name,
                        dtype: if narrow { "BF16" } else { "F32" },
                        shape: &p.shape,
                        bytes,
                        slice: None,
                    })
                    .collect();
                let path = ShardName { section: *section, rank, world_size: 2, generation: 1 };
                files.push(writer.write_safetensors(&path.to_string(), &views, &[]).unwrap());
            }
        }
        files
    }
}

/// Values between 0.5 and 1 in a random order of a megabyte, over and over. A bf16 value is the upper half of the fp32 one.
fn values(seed: u64, count: u64, narrow: bool) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    let period = count.min(1 << 18) as usize;
    let mut block = vec![0; period * 4];
    // The exponent of 0.5 … 1; only 7 bits of the mantissa, so that both types hold the same value.
    for word in block.chunks_exact_mut(4) {
        let fraction: u32 = random.random_range(0..128);
        word.copy_from_slice(&(0x3f00_0000 | (fraction << 16)).to_le_bytes());
    }
    let block: Vec<u8> = match narrow {
        true => block.chunks_exact(4).flat_map(|word| [word[2], word[3]]).collect(),
        false => block,
    };
    let size = count as usize * if narrow { 2 } else { 4 };
    let mut bytes = block.repeat(size.div_ceil(block.len().max(1)));
    bytes.truncate(size);
    bytes
}
