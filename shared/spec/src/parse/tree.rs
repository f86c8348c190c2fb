//! YAML text → a tree whose nodes know where they were written.
//!
//! `saphyr-parser` gives events with positions; this loader keeps them, and refuses what a job spec has no use for and
//! what would otherwise be read in silence: duplicate keys, tags, keys that are not text, several documents, and trees
//! that aliases blow up.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span, StrInput};

use crate::fault::{Fault, Origin, Severity};

/// Largest number of nodes of a spec, aliases expanded.
const MAX_NODES: usize = 100_000;
/// Deepest nesting of a spec.
const MAX_DEPTH: usize = 64;

/// A value and where it was written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    pub(crate) value: Value,
    pub(crate) origin: Origin,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// `plain` = without quotes, so that it may be a number, a truth value or null.
    Scalar {
        text: String,
        plain: bool,
    },
    List(Vec<Node>),
    Map(Vec<Entry>),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_origin: Origin,
    pub(crate) node: Node,
}

impl Node {
    /// Null by YAML's core schema.
    pub(crate) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar { text, plain: true } if matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL" | "None"))
    }

    /// The value as a person would recognise it in a message; long ones are cut.
    pub(crate) fn shown(&self) -> String {
        match &self.value {
            Value::Scalar { text, .. } if text.is_empty() => "\"\"".to_owned(),
            Value::Scalar { text, plain: true } => cut(text),
            Value::Scalar { text, plain: false } => format!("\"{}\"", cut(text)),
            Value::List(items) => cut(&format!("[{}]", items.iter().map(Self::shown).collect::<Vec<_>>().join(", "))),
            Value::Map(_) => "a mapping".to_owned(),
        }
    }
}

fn cut(text: &str) -> String {
    let mut shown: String = text.chars().take(60).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().count() > 60 {
        shown.push('…');
    }
    shown
}

/// Reads one YAML document.
///
/// `origin` makes the origin of every node from its position, so that overrides, which are YAML too, can name themselves.
pub(crate) fn load(source: &str, file: &str, origin: &dyn Fn(usize, usize) -> Origin) -> Result<Node, Box<Fault>> {
    let mut loader = Loader {
        parser: Parser::new_from_str(source),
        file,
        origin,
        anchors: HashMap::new(),
        nodes: 0,
        open: Vec::new(),
    };
    loader.document()
}

struct Loader<'a> {
    parser: Parser<'a, StrInput<'a>>,
    file: &'a str,
    origin: &'a dyn Fn(usize, usize) -> Origin,
    anchors: HashMap<usize, (Node, usize)>,
    nodes: usize,
    /// Open collections; with a line when a bracket opened them.
    open: Vec<Option<usize>>,
}

impl<'a> Loader<'a> {
    fn document(&mut self) -> Result<Node, Box<Fault>> {
        loop {
            let (event, span) = self.next()?;
            match event {
                Event::StreamStart | Event::DocumentStart(_) => {}
                Event::StreamEnd => {
                    return Ok(Node {
                        value: Value::Scalar { text: String::new(), plain: true },
                        origin: self.at(span),
                    });
                }
                event => {
                    let node = self.node(event, span, 0)?;
                    self.end()?;
                    return Ok(node);
                }
            }
        }
    }

    fn end(&mut self) -> Result<(), Box<Fault>> {
        loop {
            let (event, span) = self.next()?;
            match event {
                Event::DocumentEnd => {}
                Event::StreamEnd => return Ok(()),
                _ => {
                    return Err(
                        self.fault(span, "a job spec is one YAML document; remove everything from this `---` on")
                    );
                }
            }
        }
    }

    fn node(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Node, Box<Fault>> {
        self.count(span, 1)?;
        if depth > MAX_DEPTH {
            return Err(self.fault(span, "nested too deeply for a job spec"));
        }
        let before = self.nodes;
        let origin = self.at(span);
        if let Event::Scalar(_, _, _, Some(_)) | Event::SequenceStart(_, Some(_)) | Event::MappingStart(_, Some(_)) =
            event
        {
            return Err(self.fault(span, "YAML tags (`!…`) have no meaning in a job spec; write the plain value"));
        }
        let (value, anchor) = match event {
            Event::Scalar(text, style, anchor, _) => {
                (Value::Scalar { text: text.into_owned(), plain: style == ScalarStyle::Plain }, anchor)
            }
            Event::SequenceStart(anchor, _) => {
                let mut items = Vec::new();
                loop {
                    let (event, span) = self.next()?;
                    if event == Event::SequenceEnd {
                        break;
                    }
                    items.push(self.node(event, span, depth + 1)?);
                }
                (Value::List(items), anchor)
            }
            Event::MappingStart(anchor, _) => (Value::Map(self.entries(depth)?), anchor),
            Event::Alias(anchor) => {
                let Some((node, size)) = self.anchors.get(&anchor).cloned() else {
                    return Err(self.fault(span, "this alias names no anchor"));
                };
                self.count(span, size)?;
                return Ok(node);
            }
            _ => return Err(self.fault(span, "not a YAML value")),
        };
        let node = Node { value, origin };
        if anchor > 0 {
            self.anchors.insert(anchor, (node.clone(), self.nodes - before + 1));
        }
        Ok(node)
    }

    fn entries(&mut self, depth: usize) -> Result<Vec<Entry>, Box<Fault>> {
        let mut entries: Vec<Entry> = Vec::new();
        loop {
            let (event, span) = self.next()?;
            if event == Event::MappingEnd {
                return Ok(entries);
            }
            let Event::Scalar(key, ..) = event else {
                return Err(self.fault(span, "a key must be text"));
            };
            let key = key.into_owned();
            let key_origin = self.at(span);
            if let Some(first) = entries.iter().find(|entry| entry.key == key) {
                let first = match &first.key_origin {
                    Origin::At { line, .. } => format!(" (first in line {line})"),
                    _ => String::new(),
                };
                return Err(self.fault(span, &format!("key {key} is written twice{first}; keep one")));
            }
            let (event, span) = self.next()?;
            let node = self.node(event, span, depth + 1)?;
            entries.push(Entry { key, key_origin, node });
        }
    }

    fn count(&mut self, span: Span, more: usize) -> Result<(), Box<Fault>> {
        self.nodes += more;
        if self.nodes > MAX_NODES { Err(self.fault(span, "too many values for a job spec")) } else { Ok(()) }
    }

    fn next(&mut self) -> Result<(Event<'a>, Span), Box<Fault>> {
        match self.parser.next_event() {
            Some(Ok((event, span))) => {
                match event {
                    // Indentation opens a collection with no character of its own.
                    Event::SequenceStart(..) | Event::MappingStart(..) => {
                        self.open.push((!span.is_empty()).then(|| span.start.line()));
                    }
                    Event::SequenceEnd | Event::MappingEnd => drop(self.open.pop()),
                    _ => {}
                }
                Ok((event, span))
            }
            Some(Err(error)) => {
                let marker = *error.marker();
                let bracket = match self.open.last() {
                    Some(Some(line)) => format!("; is the bracket of line {line} closed?"),
                    _ => String::new(),
                };
                let message = format!("not valid YAML at column {}: {}{bracket}", marker.col() + 1, error.info());
                Err(self.fault(Span::empty(marker), &message))
            }
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn at(&self, span: Span) -> Origin {
        (self.origin)(span.start.line(), span.start.col() + 1)
    }

    fn fault(&self, span: Span, message: &str) -> Box<Fault> {
        Box::new(Fault {
            file: self.file.to_owned(),
            origin: self.at(span),
            key: String::new(),
            value: None,
            message: message.to_owned(),
            severity: Severity::Error,
        })
    }
}
