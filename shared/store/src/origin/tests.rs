use std::path::{Path, PathBuf};

use trainctl_spec::job::JobSpec;

use super::*;
use crate::checkpoints::{Retention, Selector};
use crate::layout::{RunDir, Section, ShardName};
use crate::manifest::Manifest;
use crate::manifest::tests::example;
use crate::shard::{ShardWriter, TensorView};
use crate::{CheckpointStore, Unfenced};

fn yaml(run_dir: &Path, checkpoint: &str) -> String {
    format!(
        "name: tiny\nrun_dir: {}\nmodel: {{config: {{model_type: gpt2, vocab_size: 8, n_positions: 4, n_embd: 4, n_layer: 1, n_head: 1}}}}\n\
         dataset: {{paths: /data/a, seq_length: 4}}\nstep_scheduler: {{max_steps: 40}}\n{checkpoint}",
        run_dir.display()
    )
}

/// A run whose checkpoints lie in `store`, with one of each of the steps.
async fn run(run_dir: &Path, store: &Path, steps: &[u64], checkpoint: &str) -> CheckpointStore {
    std::fs::create_dir_all(run_dir).unwrap();
    let spec = yaml(run_dir, checkpoint);
    std::fs::write(RunDir::new(run_dir).job_spec(), &spec).unwrap();
    let opened =
        CheckpointStore::open_at(&crate::Location::Directory(store.into()), RunDir::new(run_dir).control()).unwrap();
    for step in steps {
        let name = CheckpointName { epoch: 0, step: *step };
        let path = ShardName { section: Section::Model, rank: 0, world_size: 1, generation: 2 }.to_string();
        let bytes = [0; 32 * 4];
        let tensors = [
            TensorView { name: "transformer.wte.weight", dtype: "F32", shape: &[8, 4], bytes: &bytes, slice: None },
            TensorView { name: "stranger", dtype: "F32", shape: &[2], bytes: &[0; 8], slice: None },
        ];
        let files = vec![ShardWriter::new(store, name).write_safetensors(&path, &tensors, &[]).unwrap()];
        opened.commit(&Unfenced, Manifest { files, ..example(*step, Some(3.0)) }, &spec).await.unwrap();
        opened.repair_pointers(&Unfenced, "default").await.unwrap();
    }
    opened
}

fn place(text: &str) -> Place {
    Place::parse(text).unwrap()
}

#[tokio::test]
async fn a_run_a_checkpoint_weights_and_a_url_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b, elsewhere) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("elsewhere"));
    run(&a, &a, &[9], "").await;
    run(&b, &elsewhere, &[9], &format!("checkpoint: {{checkpoint_dir: {}}}\n", elsewhere.display())).await;
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let nine = Selector::Name(CheckpointName { epoch: 0, step: 9 });
    let at_a = |selector| Place { store: text(&a), run: Some(a.clone()), selector };
    assert_eq!(place(&text(&a)), at_a(Selector::Latest));
    assert_eq!(place(&format!("{}/LOWEST_VAL", text(&a))), at_a(Selector::LowestVal));
    assert_eq!(place(&format!("{}/epoch_0_step_9/", text(&a))), at_a(nine));
    let weights = place(&format!("{}/weights/epoch_0_step_9", text(&a)));
    assert_eq!(weights, Place { store: format!("{}/weights", text(&a)), ..at_a(nine) });
    assert_eq!(place(&text(&b)), Place { store: text(&elsewhere), run: Some(b.clone()), selector: Selector::Latest });
    // A folder of checkpoints that belongs to no known run.
    assert_eq!(place(&text(&elsewhere)), Place { store: text(&elsewhere), run: None, selector: Selector::Latest });
    let url = place("s3://bucket/runs/a/epoch_0_step_9");
    assert_eq!(url, Place { store: "s3://bucket/runs/a".into(), run: None, selector: nine });
    let missing = Place::parse(&text(&dir.path().join("nothing"))).unwrap_err().to_string();
    assert!(missing.contains("nothing does not exist") && missing.contains("<run directory>/<name>"), "{missing}");
}

#[tokio::test]
async fn a_parent_is_found_with_its_spec_and_stays_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let store = run(dir.path(), dir.path(), &[9, 19], "").await;
    let parent = Parent::find(dir.path().to_str().unwrap(), Keep::ALL).await.unwrap();
    assert_eq!((parent.origin.name.step, parent.source().step), (19, 19));
    assert_eq!(parent.spec.step_scheduler.max_steps, 40);
    assert_eq!(parent.origin.text(), format!("{}/epoch_0_step_19", dir.path().display()));
    assert_eq!(Parent::of(&parent.origin).await.unwrap().origin, parent.origin);

    let other = Origin { manifest: "00".repeat(32), ..parent.origin.clone() };
    assert!(matches!(Parent::of(&other).await, Err(FindError::Store(Error::OtherManifest { .. }))));
    std::fs::write(store.path(parent.origin.name).join("config.yaml"), yaml(dir.path(), "seed: 2\n")).unwrap();
    let changed = Parent::of(&parent.origin).await.unwrap_err().to_string();
    assert!(changed.contains("config.yaml"), "{changed}");
    std::fs::remove_file(store.path(parent.origin.name).join("config.yaml")).unwrap();
    let gone = Parent::of(&parent.origin).await.unwrap_err().to_string();
    assert!(gone.contains("epoch_0_step_19") && gone.contains("epoch_0_step_9"), "the older one is offered: {gone}");
}

#[tokio::test]
async fn weights_that_do_not_fit_are_listed_with_both_shapes() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), dir.path(), &[9], "").await;
    let parent = Parent::find(dir.path().to_str().unwrap(), Keep::WEIGHTS).await.unwrap();
    let model = |vocabulary: u64| {
        let config = serde_json::json!({
            "model_type": "gpt2", "vocab_size": vocabulary, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1,
        });
        trainctl_spec::Architecture::from_config(config.as_object().unwrap()).unwrap()
    };
    let lines = parent.misfits(&model(16)).await.unwrap();
    for line in [
        "model/transformer.wte.weight: [8, 4] in the checkpoint, [16, 4] in the model",
        "model/transformer.wpe.weight: missing in the checkpoint, [4, 4] in the model",
        "model/stranger: [2] in the checkpoint, unknown to the model",
    ] {
        assert!(lines.iter().any(|got| got == line), "{line} in {lines:#?}");
    }
    assert!(!parent.misfits(&model(8)).await.unwrap().iter().any(|line| line.contains("wte")));
}

#[tokio::test]
async fn an_origin_is_read_back_and_pins_its_parent_without_end() {
    let dir = tempfile::tempdir().unwrap();
    let (parent_dir, child) = (dir.path().join("parent"), dir.path().join("child"));
    let store = run(&parent_dir, &parent_dir, &[9, 19, 29], "").await;
    let parent = Parent::find(&format!("{}/epoch_0_step_9", parent_dir.display()), Keep::ALL).await.unwrap();
    let control = Io::new(RunDir::new(&child).control());
    assert_eq!(Origin::read(&control).await.unwrap(), None);
    parent.origin.write(&control).await.unwrap();
    assert_eq!(Origin::read(&control).await.unwrap(), Some(parent.origin.clone()));

    assert!(parent.origin.pin(&child).await.unwrap());
    assert!(store.pins().await.unwrap()[0].for_good);
    store.prune(&Unfenced, &Retention::newest(Some(1), "default")).await.unwrap();
    assert!(Parent::of(&parent.origin).await.is_ok(), "C4: what a fork begins with stays");
    parent.origin.release(&child).await.unwrap();
    parent.origin.release(&child).await.unwrap();
    assert_eq!(store.pins().await.unwrap(), []);
    // Nobody knows where pins of a bare folder of checkpoints would be looked for.
    assert!(!Origin { run: None, ..parent.origin.clone() }.pin(&child).await.unwrap());

    std::fs::write(control.root().join(ORIGIN), "{").unwrap();
    assert!(matches!(Origin::read(&control).await, Err(Error::Origin { .. })));
}

#[test]
fn a_forks_origin_counts_first_and_restore_from_by_what_it_named_first() {
    let spec = |checkpoint: &str| JobSpec::from_yaml(&yaml(Path::new("/runs/child"), checkpoint)).unwrap();
    let (plain, restored) = (spec(""), spec("checkpoint: {restore_from: /runs/a}\n"));
    let weights = spec("checkpoint: {restore_from: /runs/a, weights_only: true}\n");
    let origin = |from: Option<&str>, keep| Origin {
        store: "/runs/a".into(),
        name: CheckpointName { epoch: 0, step: 9 },
        manifest: String::new(),
        keep,
        run: Some(PathBuf::from("/runs/a")),
        restore_from: from.map(str::to_owned),
    };
    let named = |keep| Wanted::Named { from: "/runs/a".into(), keep };
    let (forked, first) = (origin(None, Keep::WEIGHTS), origin(Some("/runs/a"), Keep::ALL));
    assert_eq!(decide_wanted(&plain, None), Wanted::Scratch);
    assert_eq!(decide_wanted(&plain, Some(forked.clone())), Wanted::Exactly(forked.clone()));
    assert_eq!(decide_wanted(&restored, Some(forked.clone())), Wanted::Exactly(forked));
    assert_eq!(decide_wanted(&restored, None), named(Keep::ALL));
    assert_eq!(decide_wanted(&restored, Some(first.clone())), Wanted::Exactly(first.clone()));
    assert_eq!(decide_wanted(&weights, Some(first.clone())), named(Keep::WEIGHTS), "asked otherwise now");
    assert_eq!(decide_wanted(&plain, Some(first)), Wanted::Scratch, "restore_from was taken out");
}
