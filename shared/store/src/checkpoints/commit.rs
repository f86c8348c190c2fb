//! The commit itself: its own files, the directories, the manifest (C2, C3).

use trainctl_spec::report::ShardFile;

use super::{CheckpointStore, Committed};
use crate::error::{Error, Result};
use crate::fault::FailPoint;
use crate::io::Created;
use crate::layout::{CONFIG, CheckpointName, LOSSES, MANIFEST};
use crate::manifest::{FORMAT, Fault, Manifest, Metrics};
use crate::shard::hash::check_record;
use crate::tenure::Fence;
use crate::wall;

/// A commit meets another writer's manifest at most twice: a dead generation's, and its own of before.
const COMMIT_TRIES: usize = 4;

/// What a commit finds in its place.
enum Occupant {
    /// No manifest.
    None,
    /// This very checkpoint.
    Same(Box<Committed>),
    /// A manifest that a generation made which was dead by then: this one had retired all that it found (C6). Or one that a
    /// crash tore where there are no hard links. Its bytes.
    Dead(Vec<u8>),
}

/// Outcome of [`CheckpointStore::commit`].
#[derive(Clone, Debug, PartialEq)]
pub enum CommitOutcome {
    /// The checkpoint exists from now on.
    Committed(Committed),
    /// It existed before; nothing was changed. The one that is there.
    AlreadyCommitted(Committed),
}

impl CommitOutcome {
    /// The checkpoint that exists now.
    pub fn committed(&self) -> &Committed {
        match self {
            Self::Committed(committed) | Self::AlreadyCommitted(committed) => committed,
        }
    }
}

impl CheckpointStore {
    /// Commits a checkpoint whose shards are durable (C2, C3): writes `config.yaml` and `losses.json`, syncs the
    /// directories and makes the manifest. `draft` lists the ranks' files; its `format`, `spec_hash`, `created_at` and the
    /// two files' records are filled in here. Pointers are the next step: [`CheckpointStore::repair_pointers`].
    ///
    /// # Errors
    /// [`Error::Superseded`] from the fence; [`Error::Commit`] if a listed file is missing or has another size, or the
    /// checkpoint was committed with other content; [`Error::Io`]. After an error the checkpoint may be committed or not;
    /// call again to know.
    pub async fn commit(&self, fence: &dyn Fence, draft: Manifest, config_yaml: &str) -> Result<CommitOutcome> {
        let name = draft.name;
        fence.pass().await?;
        self.io.run(move |files| files.sweep_dir(&name.to_string(), FailPoint::COMMIT_SWEEP)).await?;
        if let Occupant::Same(committed) = self.occupant(&draft).await? {
            return Ok(CommitOutcome::AlreadyCommitted(*committed));
        }
        self.check_draft(&draft).await?;
        let mut manifest = draft;
        manifest.format = FORMAT;
        manifest.created_at = wall::now();
        manifest.spec_hash = blake3::hash(config_yaml.as_bytes()).to_hex().to_string();
        manifest.files.retain(|file| file.path != CONFIG && file.path != LOSSES);
        let losses = losses_json(&manifest.metrics);
        let mut own = Vec::new();
        for (file, bytes, point) in [
            (CONFIG, config_yaml.as_bytes(), FailPoint::COMMIT_CONFIG),
            (LOSSES, losses.as_bytes(), FailPoint::COMMIT_LOSSES),
        ] {
            self.put_once(fence, &manifest, file, bytes, point).await?;
            own.push(describe(file, bytes));
        }
        for directory in [name.key("model"), name.key("optim"), name.to_string(), String::new()] {
            self.io.sync_dir(&directory, FailPoint::COMMIT_SYNC).await?;
        }
        let mut whole = manifest.clone();
        whole.files.append(&mut own);
        whole.files.sort_by(|a, b| a.path.cmp(&b.path));
        let refused = |fault: Fault| Error::Commit { name: name.to_string(), reason: fault.to_string() };
        let (bytes, hash) = whole.encode().map_err(refused)?;
        for _ in 0..COMMIT_TRIES {
            fence.pass().await?;
            let (key, bytes, point) = (name.key(MANIFEST), bytes.clone(), FailPoint::COMMIT_MANIFEST);
            let made = match self.occupant(&manifest).await? {
                Occupant::Same(committed) => return Ok(CommitOutcome::AlreadyCommitted(*committed)),
                Occupant::None => self.io.create_if_absent(&key, bytes, point).await? == Created::New,
                Occupant::Dead(old) => self.io.replace_exactly(&key, old, bytes, point).await?,
            };
            if made {
                return Ok(CommitOutcome::Committed(Committed { manifest: whole, hash }));
            }
        }
        let reason = "somebody else writes its manifest again and again".to_owned();
        Err(Error::Commit { name: name.to_string(), reason })
    }

    /// What is in the place of the commit that `draft` describes.
    async fn occupant(&self, draft: &Manifest) -> Result<Occupant> {
        let name = draft.name;
        let Some(bytes) = self.io.read(&name.key(MANIFEST)).await? else { return Ok(Occupant::None) };
        let reason = match Self::parse(name, &bytes) {
            Ok(found) if found.manifest.generation < draft.generation => return Ok(Occupant::Dead(bytes)),
            Ok(found) if is_commit_of(&found.manifest, draft) => return Ok(Occupant::Same(Box::new(found))),
            Ok(found) => format!("generation {} committed it with other content", found.manifest.generation),
            Err(fault) if fault.was_committed() => {
                return Err(Error::Manifest { path: self.path(name).join(MANIFEST), fault });
            }
            Err(_) => return Ok(Occupant::Dead(bytes)),
        };
        Err(Error::Commit { name: name.to_string(), reason })
    }

    /// Removes what killed predecessors left of commits.
    pub(super) async fn sweep_commits(&self) -> Result<()> {
        let is_checkpoint = |name: &str| name.parse::<CheckpointName>().is_ok();
        for entry in self.io.list("").await?.into_iter().filter(|entry| is_checkpoint(&entry.name)) {
            self.io.run(move |files| files.sweep_dir(&entry.name, FailPoint::COMMIT_SWEEP)).await?;
        }
        Ok(())
    }

    async fn check_draft(&self, draft: &Manifest) -> Result<()> {
        let fault = |reason: String| Error::Commit { name: draft.name.to_string(), reason };
        if draft.name.step != draft.step || draft.name.epoch != draft.epoch {
            return Err(fault(format!("it is named for another step than {}", draft.step)));
        }
        let mut paths: Vec<_> = draft.files.iter().map(|file| &file.path).collect();
        paths.sort();
        if let Some(twice) = paths.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(fault(format!("{} was reported twice", twice[0])));
        }
        for file in &draft.files {
            check_record(FORMAT, file).map_err(fault)?;
        }
        match self.check_sizes(draft).await? {
            Some(found) => Err(fault(found.to_string())),
            None => Ok(()),
        }
    }

    /// Writes one of the commit's own files. An equal one is left; a different one is what an interrupted commit left, and
    /// is replaced only while there is no manifest: a holder that wakes up late must not change a committed file (C2).
    async fn put_once(
        &self,
        fence: &dyn Fence,
        draft: &Manifest,
        file: &str,
        bytes: &[u8],
        point: FailPoint,
    ) -> Result<()> {
        let key = draft.name.key(file);
        fence.pass().await?;
        if self.io.create_if_absent(&key, bytes.to_vec(), point).await? == Created::New {
            return Ok(());
        }
        let found = self.io.read(&key).await?.unwrap_or_default();
        if found == bytes {
            return Ok(());
        }
        fence.pass().await?;
        let is_free = !matches!(self.occupant(draft).await?, Occupant::Same(_));
        if is_free && self.io.replace_exactly(&key, found, bytes.to_vec(), point).await? {
            return Ok(());
        }
        let reason = format!("somebody else commits it at this moment, with another {file}");
        Err(Error::Commit { name: draft.name.to_string(), reason })
    }
}

/// Whether a manifest is what a commit of `draft` writes, or wrote before it was cut off.
fn is_commit_of(found: &Manifest, draft: &Manifest) -> bool {
    let holds = |file: &ShardFile| file.path == CONFIG || file.path == LOSSES || found.files.contains(file);
    found.generation == draft.generation && found.state_hash == draft.state_hash && draft.files.iter().all(holds)
}

/// `losses.json` as NeMo AutoModel writes it: `train_loss`, and `val_loss` for the unnamed validation set or one key for
/// each named one.
fn losses_json(metrics: &Metrics) -> String {
    let mut losses = serde_json::Map::new();
    losses.insert("train_loss".into(), metrics.train_loss.into());
    for (name, loss) in &metrics.val_losses {
        let key = if name == "default" { "val_loss" } else { name };
        losses.insert(key.to_owned(), (*loss).into());
    }
    format!("{}\n", serde_json::Value::Object(losses))
}

fn describe(path: &str, bytes: &[u8]) -> ShardFile {
    let mut hasher = crate::shard::FileHasher::default();
    hasher.update(bytes);
    hasher.finish(path)
}
