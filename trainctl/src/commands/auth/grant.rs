//! `trainctl auth grant`

use std::path::PathBuf;

use clap::Args;
use trainctl_proto::v1;
use trainctl_runtime::auth::{self, HOUR_MS};

use super::GrantView;
use crate::client::{self, CoordinatorArgs};
use crate::exit::{Exit, Failure, Outcome};
use crate::output::{OutputArgs, json, line, moment, note};

/// Make a token that reads a coordinator's jobs
///
/// The token is shown once and kept nowhere. Whoever has it may look until it expires or is revoked; they name the file of
/// --file with --token-file or TRAINCTL_TOKEN_FILE.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainctl auth grant ann --expires 30d --file ann.json")]
pub(super) struct Grant {
    /// For whom: letters, digits and any of . _ - @
    name: String,
    /// How long it is good for: a number and s, m, h or d
    #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = life)]
    expires: u64,
    /// Write the token to this file, 0600, instead of printing it
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    coordinator: CoordinatorArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Grant {
    pub(super) async fn run(self) -> Outcome {
        if let Some(file) = self.file.as_ref().filter(|file| file.exists()) {
            return Err(Failure::usage(format!("--file {}: exists; remove it or choose another name", file.display())));
        }
        let mut client = super::connect(&self.coordinator).await?;
        let request = v1::AddGrantRequest { name: self.name.clone(), life_ms: self.expires };
        let answer = client.add_grant(request).await.map_err(|status| client::failure(&status))?.into_inner();
        let mut grant = GrantView::from(answer.grant.unwrap_or_default());
        match &self.file {
            None => grant.token = Some(answer.token),
            Some(file) => {
                if let Err(error) = auth::write_file(file, &answer.token) {
                    // Nobody has it: it must not stay.
                    let request = v1::RevokeGrantRequest { name: self.name.clone() };
                    let revoked = client.revoke_grant(request).await.map_err(|status| client::failure(&status));
                    let left = match revoked {
                        Ok(_) => "the grant was taken back",
                        Err(_) => "take the grant back with `trainctl auth revoke`",
                    };
                    return Err(Failure::usage(format!("{error}; {left}")));
                }
                note(&format!("{} has the token; give it to {} and to nobody else", file.display(), grant.name));
            }
        }
        note(&format!("{} may look until {}", grant.name, moment(grant.expires_at_ms)));
        if self.output.is_json() {
            json(&grant)?;
        } else if let Some(token) = &grant.token {
            note("the token, which is not shown again; a file that holds it will do for --token-file:");
            line(token)?;
        }
        Ok(Exit::Ok)
    }
}

/// "30d" as milliseconds.
fn life(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no duration: write a number and s, m, h or d, as in 30d");
    let unit = text.chars().last().ok_or_else(wrong)?;
    let unit_ms = match unit {
        's' => 1000,
        'm' => HOUR_MS / 60,
        'h' => HOUR_MS,
        'd' => 24 * HOUR_MS,
        _ => return Err(wrong()),
    };
    let number: u64 = text.strip_suffix(unit).and_then(|number| number.parse().ok()).ok_or_else(wrong)?;
    number.checked_mul(unit_ms).filter(|ms| *ms > 0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_a_number_and_a_unit() {
        assert_eq!(
            ["90s", "5m", "12h", "30d"].map(|text| life(text).unwrap()),
            [90_000, 300_000, 43_200_000, 2_592_000_000]
        );
        for text in ["", "30", "d", "-1d", "1.5h", "30 d", "0d", "30ä", "99999999999999999999d"] {
            assert!(life(text).is_err(), "{text:?}");
        }
    }
}
