//! Who may call what: every RPC but health needs proof of who calls, on loopback too.
//!
//! | role | proves itself by | opens |
//! |---|---|---|
//! | owner | the token of `owner.json` | everything but what workers do on TLS listeners |
//! | worker | on a TLS listener by a certificate of the run's CA ([`crate::certificates`]), for which it enrols with the token of `join.json`; on loopback, which speaks no TLS, by that token | its session and rendezvous |
//! | observer | a token of `trainctl auth grant` ([`Grants`]) | what only reads |
//!
//! [`access::decide`] is the decision, [`AuthLayer`] applies it. Which method asks for what is the server's own table.

pub mod access;
mod grants;
mod layer;
mod tokens;

pub use access::{Access, Caller, Role};
pub use grants::{Grant, GrantError, Grants, HOUR_MS, MAX_GRANTS};
pub use layer::{AuthLayer, Gate};
pub use tokens::{
    Error, JOIN_FILE, OWNER_FILE, Tokens, load_or_create, publish_join, random_hex, read_file, read_join, read_owner,
    write_file,
};
