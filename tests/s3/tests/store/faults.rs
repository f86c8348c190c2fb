//! A server that misbehaves, and what a person sees of it.

use std::time::{Duration, Instant};

use trainctl_s3::{SECRET_KEY, Switches};

use crate::scene::{Scene, tail};

#[test]
fn refused_and_lost_and_truncated_answers_change_nothing() {
    let scene = Scene::new();
    let seed: u64 = std::env::var("TRAINCTL_SEED").map_or(7, |text| text.parse().unwrap());
    eprintln!("seed: TRAINCTL_SEED={seed}");
    for (run, switches) in [
        ("refused", Switches { refuse: 0.2, ..Switches::default() }),
        ("lost", Switches { lose: 0.3, ..Switches::default() }),
        ("truncated", Switches { truncate: 0.3, ..Switches::default() }),
        ("all", Switches { refuse: 0.1, lose: 0.1, truncate: 0.1, ..Switches::default() }),
    ] {
        scene.server.set(&Switches { seed, ..switches });
        scene.must("save", run);
        scene.must("complete", run);
        scene.server.set(&Switches::default());
        scene.must("complete", run);
    }
    for fault in ["refused", "lost", "truncated"] {
        let hit = scene.server.requests().iter().filter(|request| request.fault.as_deref() == Some(fault)).count();
        assert!(hit > 5, "only {hit} requests were {fault}");
    }
}

#[test]
fn large_uploads_survive_lost_answers_and_a_server_that_dies_in_the_middle_of_one() {
    let mut scene = Scene::new();
    scene.server.set(&Switches { seed: 3, lose: 0.2, refuse: 0.1, ..Switches::default() });
    scene.must("save-large", "lost");
    scene.must("complete-large", "lost");
    // Nobody knows the upload that was begun by a request whose answer was lost: that one is left to the bucket's own rule.
    let requests = scene.server.requests();
    let begun = requests.iter().filter(|request| request.method == "POST" && request.query.starts_with("uploads"));
    let unknown = begun.filter(|request| request.fault.as_deref() == Some("lost")).count();
    assert_eq!(scene.server.open_uploads().len(), unknown, "{:?}", scene.server.open_uploads());

    scene.server.restart();
    scene.server.set(&Switches { die_at_part: Some(3), ..Switches::default() });
    let saving = scene.spawn(scene.command("save-large", "dying"));
    let patience = Instant::now() + Duration::from_secs(60);
    while !scene.server.has_ended() {
        assert!(Instant::now() < patience, "the server did not die");
        std::thread::sleep(Duration::from_millis(5));
    }
    scene.server.restart();
    let ended = saving.wait();
    assert!(ended.success, "{}", tail(&ended.said));
    scene.must("complete-large", "dying");
}

#[test]
fn slow_reads_are_waited_for() {
    let scene = Scene::new();
    scene.must("save-large", "run");
    scene.server.set(&Switches { bytes_per_second: Some(64 << 20), ..Switches::default() });
    let started = Instant::now();
    scene.must("complete-large", "run");
    assert!(started.elapsed() > Duration::from_millis(800), "the switch must have slowed it");
}

#[test]
fn a_skewed_clock_is_harmless_within_s3s_limits_and_named_beyond() {
    let scene = Scene::new();
    scene.server.set(&Switches { clock_offset_seconds: -600, ..Switches::default() });
    scene.must("save", "run");
    scene.must("complete", "run");
    scene.server.set(&Switches { clock_offset_seconds: 7200, ..Switches::default() });
    let started = Instant::now();
    let ended = scene.run("save", "run");
    assert!(!ended.success && ended.said.contains("RequestTimeTooSkewed"), "{}", tail(&ended.said));
    assert!(ended.said.contains("set this one by NTP"), "{}", tail(&ended.said));
    assert!(started.elapsed() < Duration::from_secs(10), "a refusal for good is not tried again");
    scene.server.set(&Switches::default());
    scene.must("complete", "run");
}

#[test]
fn c2_a_server_that_ignores_conditions_is_refused_before_anything_is_written() {
    let scene = Scene::new();
    scene.server.set(&Switches { ignore_conditions: true, ..Switches::default() });
    let ended = scene.run("save", "run");
    assert!(!ended.success, "{}", tail(&ended.said));
    assert!(ended.said.contains("ignores the condition of a put"), "{}", tail(&ended.said));
    let manifests: Vec<_> = scene.server.keys().into_iter().filter(|key| !key.contains("/model/shard-")).collect();
    assert!(manifests.is_empty(), "no commit, no pointer, no probe is left: {manifests:?}");
}

#[test]
fn credentials_come_from_the_files_too_and_are_never_said() {
    let scene = Scene::new();
    let credentials = scene.path("credentials");
    let profile = |secret: &str| {
        format!("[lab]\naws_access_key_id = {}\naws_secret_access_key = {secret}\n", trainctl_s3::ACCESS_KEY)
    };
    let with_files = |task: &str| {
        let mut command = scene.command(task, "run");
        command.env_remove("AWS_ACCESS_KEY_ID").env_remove("AWS_SECRET_ACCESS_KEY");
        command.env("AWS_SHARED_CREDENTIALS_FILE", &credentials).env("AWS_PROFILE", "lab");
        // Every wait looks for the secret in all that was said.
        command.env(crate::child::LOG_ALL, "");
        scene.spawn(command).wait()
    };
    std::fs::write(&credentials, profile(SECRET_KEY)).unwrap();
    let ended = with_files("save");
    assert!(ended.success, "{}", tail(&ended.said));
    std::fs::write(&credentials, profile("another-secret-that-is-wrong")).unwrap();
    let ended = with_files("save");
    assert!(!ended.success && ended.said.contains("check the credentials"), "{}", tail(&ended.said));
    assert!(!ended.said.contains("another-secret-that-is-wrong"), "{}", tail(&ended.said));
    let mut command = scene.command("save", "run");
    command
        .env_remove("AWS_ACCESS_KEY_ID")
        .env_remove("AWS_SECRET_ACCESS_KEY")
        .env("AWS_EC2_METADATA_DISABLED", "true");
    let ended = scene.spawn(command).wait();
    assert!(!ended.success && ended.said.contains("there are no credentials"), "{}", tail(&ended.said));
}

#[test]
fn a_bucket_that_is_not_there_is_named() {
    let scene = Scene::new();
    let mut command = scene.command("save", "run");
    command.env(crate::child::URL, "s3://nowhere/run");
    let ended = scene.spawn(command).wait();
    assert!(!ended.success, "{}", tail(&ended.said));
    assert!(
        ended.said.contains("NoSuchBucket") && ended.said.contains("make the bucket first"),
        "{}",
        tail(&ended.said)
    );
}
