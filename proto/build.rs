//! Compiles the protos with protox, so that no protoc is needed on the machine.
use std::path::PathBuf;

const FILES: [&str; 6] = ["access", "common", "jobs", "worker", "rendezvous", "trainer"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files: Vec<String> = FILES.iter().map(|name| format!("trainctl/v1/{name}.proto")).collect();
    let descriptors = protox::compile(&files, ["."])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), prost_encode(&descriptors))?;
    let mut methods = Vec::new();
    for file in &descriptors.file {
        for service in &file.service {
            let path = |method: &str| format!("/{}.{}/{method}", file.package(), service.name());
            methods.extend(service.method.iter().map(|method| path(method.name())));
        }
    }
    std::fs::write(out.join("methods.rs"), format!("&{methods:?}"))?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    for file in files {
        println!("cargo::rerun-if-changed={file}");
    }
    Ok(())
}

/// The descriptor set as bytes, for gRPC reflection.
fn prost_encode(set: &impl prost::Message) -> Vec<u8> {
    set.encode_to_vec()
}
