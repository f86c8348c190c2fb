//! What a store answered, for people: the code and the message, and what to do. Never a whole answer: some servers repeat
//! the access key and the signed headers in it.

use object_store::Error;

/// One sentence about a failed request, with its remedy where one is known.
pub(super) fn explain(error: &Error) -> String {
    let text = full_text(error);
    let code = tag(&text, "Code");
    let said = match (code, tag(&text, "Message")) {
        (Some(code), Some(message)) => format!("{} ({code}: {message})", without_body(&text)),
        (Some(code), None) => format!("{} ({code})", without_body(&text)),
        _ => without_body(&text).to_owned(),
    };
    format!("{said}{}", remedy(error, code, &text))
}

/// What a caller gets of a failed request.
pub(super) fn failed(action: &'static str, url: impl std::fmt::Display, error: &Error) -> crate::Error {
    let (url, reason) = (url.to_string(), explain(error));
    crate::Error::Object { action, url, reason, away: is_away(error) }
}

/// No answer, or one of trouble (5xx, too many requests): the client has tried again for a while. What a person must mend is
/// no such trouble.
fn is_away(error: &Error) -> bool {
    let text = full_text(error);
    matches!(error, Error::Generic { .. }) && remedy(error, tag(&text, "Code"), &text).is_empty()
}

/// The error with its causes, each once.
fn full_text(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

fn tag<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once("</").map(|(inner, _)| inner)
}

/// The client's own words, up to the server's XML.
fn without_body(text: &str) -> &str {
    let end = ["<?xml", "<Error>"].iter().filter_map(|mark| text.find(mark)).min().unwrap_or(text.len());
    text[..end].trim_end().trim_end_matches(':')
}

fn remedy(error: &Error, code: Option<&str>, text: &str) -> &'static str {
    match (code, error) {
        (Some("RequestTimeTooSkewed"), _) => {
            "; the clocks of this machine and of the store differ: set this one by NTP"
        }
        (Some("NoSuchBucket"), _) => "; make the bucket first, or correct checkpoint.checkpoint_dir",
        (Some("SignatureDoesNotMatch" | "InvalidAccessKeyId" | "ExpiredToken"), _)
        | (_, Error::Unauthenticated { .. }) => "; check the credentials of this environment (docs/object-stores.md)",
        (Some("AccessDenied"), _) | (_, Error::PermissionDenied { .. }) => {
            "; these credentials may not do that: reading, writing, listing and deleting below the prefix are needed"
        }
        (Some("PermanentRedirect" | "AuthorizationHeaderMalformed"), _) => "; set AWS_REGION to the bucket's region",
        _ if text.contains("scheme is not allowed") => "; an http:// endpoint needs AWS_ALLOW_HTTP=true",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> Error {
        Error::Generic { store: "S3", source: text.to_owned().into() }
    }

    #[test]
    fn the_servers_answer_is_reduced_to_code_and_message() {
        let body = "Error performing PUT http://h/b/k in 3ms - Server returned non-2xx status code: 403 Forbidden: \
                    <?xml version=\"1.0\"?><Error><Code>SignatureDoesNotMatch</Code><Message>It does not match.</Message>\
                    <AWSAccessKeyId>AKIAKEY</AWSAccessKeyId><StringToSign>x-amz-security-token:tok</StringToSign></Error>";
        let said = explain(&error(body));
        assert!(
            said.contains("403 Forbidden (SignatureDoesNotMatch: It does not match.); check the credentials"),
            "{said}"
        );
        assert!(!said.contains("AKIAKEY") && !said.contains("tok"), "{said}");
    }

    #[test]
    fn skewed_clocks_have_a_remedy_of_their_own() {
        let said = explain(&error("403: <Error><Code>RequestTimeTooSkewed</Code></Error>"));
        assert!(said.contains("NTP"), "{said}");
        assert_eq!(explain(&error("connection refused")), "Generic S3 error: connection refused");
    }

    #[test]
    fn a_store_that_does_not_answer_is_away_and_one_that_refuses_is_not() {
        let refused = Error::PermissionDenied { path: "k".to_owned(), source: "403".into() };
        let away = |error: &Error| failed("read", "s3://b/k", error).is_away();
        assert!(
            away(&error("connection refused")) && away(&error("Server error: <Error><Code>SlowDown</Code></Error>"))
        );
        assert!(!away(&refused) && !away(&error("403: <Error><Code>ExpiredToken</Code></Error>")));
        assert!(!away(&error("URL scheme is not allowed")));
    }
}
