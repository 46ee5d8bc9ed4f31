// Uses every function of an adapter on real VMs as a caller with the iii-sdk of
// crates.io does. The text of MARK is in everything that must not be logged. It
// leaves no sandbox.
use std::collections::BTreeSet;
use std::env::var;
use std::error::Error as Any;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use iii_helpers::observability::OtelConfig;
use iii_sdk::channels::{ChannelReader, StreamChannelRef};
use iii_sdk::errors::Error;
use iii_sdk::helpers::create_channel;
use iii_sdk::protocol::TriggerRequest;
use iii_sdk::{register_worker, IIIClient, InitOptions};
use serde_json::{from_str, from_value, json, Value};

const ADAPTER: &str = "sandbox-libkrun";

type Outcome<T> = Result<T, Box<dyn Any>>;

struct Caller {
    client: IIIClient,
    url: String,
    image: String,
    mark: String,
    called: Mutex<BTreeSet<String>>,
}

impl Caller {
    async fn call_within(&self, leaf: &str, payload: Value, timeout_ms: u64) -> Result<Value, Error> {
        let function_id = format!("{ADAPTER}::{leaf}");
        self.called.lock().unwrap().insert(function_id.clone());
        let request = TriggerRequest { function_id, payload, action: None, timeout_ms: Some(timeout_ms) };
        self.client.trigger(request).await
    }

    async fn call(&self, leaf: &str, payload: Value) -> Result<Value, Error> {
        self.call_within(leaf, payload, 120_000).await
    }

    /// Returns the error of a call that fails with the S-code: all of its message.
    async fn refused(&self, code: &str, leaf: &str, payload: Value) -> Value {
        match self.call(leaf, payload).await {
            Err(Error::Remote { code: outer, message, stacktrace }) => {
                assert_eq!((outer.as_str(), stacktrace), ("invocation_failed", None));
                let fault: Value = from_str(&message).expect(&message);
                assert_eq!(fault["code"], code, "{message}");
                assert!(fault["docs_url"].as_str().unwrap().ends_with(&format!("#{code}")));
                fault
            }
            other => panic!("{leaf} was to fail with {code}: {other:?}"),
        }
    }

    async fn lifecycle(&self) -> Outcome<Value> {
        // Null, as a handler without arguments would send it.
        let info = self.call("adapter::info", Value::Null).await?;
        assert_eq!(info["adapter"], ADAPTER);
        assert_eq!(info["contract"], json!({"major": 1, "minor": 1}));
        let catalog = self.call("catalog::list", Value::Null).await?;
        assert_eq!(catalog["images"][2]["name"], self.image);
        let run = json!({"image": self.image, "lang": "shell", "code": "echo $MARK; exit 3", "env": {"MARK": self.mark}});
        let ran = self.call("run", run).await?;
        assert_eq!(ran["stdout"], format!("{}\n", self.mark));
        assert_eq!(ran["exit_code"], 3);
        let made = self.call("create", json!({"image": self.image, "memory_mb": 256, "name": null})).await?;
        let list = self.call("list", json!({})).await?;
        assert_eq!(list["sandboxes"].as_array().unwrap().len(), 1);
        assert_eq!(list["sandboxes"][0]["sandbox_id"], made["sandbox_id"]);
        assert_eq!(self.refused("S100", "create", json!({"image": "no-such-image"})).await["retryable"], false);
        Ok(made["sandbox_id"].clone())
    }

    async fn programs(&self, id: &Value) -> Outcome<()> {
        let env = json!({"sandbox_id": id, "argv": ["sh", "-c", "echo π $MARK; exit 7"], "env": {"MARK": self.mark}});
        let ran = self.call("exec", env).await?;
        assert_eq!(ran["stdout"], format!("π {}\n", self.mark));
        assert_eq!((ran["exit_code"].as_i64(), ran["success"].as_bool()), (Some(7), Some(false)));
        self.refused("S200", "exec", json!({"sandbox_id": id, "cmd": "sleep 100", "timeout_ms": 300})).await;
        // As large as replies get: this SDK takes them.
        let much = json!({"sandbox_id": id, "argv": ["sh", "-c", "head -c 1048577 /dev/zero | tee /dev/stderr"]});
        let ran = self.call("exec", much).await?;
        for stream in ["stdout", "stderr"] {
            assert_eq!(ran[stream].as_str().unwrap().len(), 1 << 20);
            assert_eq!(ran[format!("{stream}_truncated")], true);
        }
        // The caller's own time: the slot is free again when the program has ended.
        let slow = json!({"sandbox_id": id, "cmd": "sleep 100", "timeout_ms": 1000});
        assert!(matches!(self.call_within("exec", slow, 200).await, Err(Error::Timeout)));
        while self.call("list", json!({})).await?["sandboxes"][0]["exec_in_flight"] != 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    async fn files(&self, id: &Value) -> Outcome<()> {
        let text = format!("one {}\ntwo\n", self.mark);
        let mut write = json!({"sandbox_id": id, "path": "/data/sub/text", "content": text});
        let parent = self.refused("S211", "fs::write", write.clone()).await;
        assert_eq!(parent["fix"], json!({"parents": true}));
        write["parents"] = json!(true);
        assert_eq!(self.call("fs::write", write).await?["bytes_written"], text.len());
        self.call("fs::mkdir", json!({"sandbox_id": id, "path": "/data/dir"})).await?;
        let chmod = json!({"sandbox_id": id, "path": "/data/sub/text", "mode": "0750", "uid": null});
        assert_eq!(self.call("fs::chmod", chmod).await?["updated"], 1);
        assert_eq!(self.call("fs::stat", json!({"sandbox_id": id, "path": "/data/sub/text"})).await?["mode"], "0750");
        let mv = json!({"sandbox_id": id, "src": "/data/sub/text", "dst": "/data/moved"});
        assert_eq!(self.call("fs::mv", mv).await?["moved"], true);
        let sed = json!({"sandbox_id": id, "path": "/data", "pattern": "(t)wo", "replacement": "${1}hree"});
        assert_eq!(self.call("fs::sed", sed).await?["total_replacements"], 1);
        let grep = self.call("fs::grep", json!({"sandbox_id": id, "path": "/data", "pattern": "^three$"})).await?;
        assert_eq!(grep["matches"], json!([{"path": "/data/moved", "line": 2, "content": "three"}]));
        self.refused("S217", "fs::grep", json!({"sandbox_id": id, "path": "/data", "pattern": "("})).await;
        assert_eq!(self.call("fs::rm", json!({"sandbox_id": id, "path": "/data/dir"})).await?["removed"], true);
        let ls = self.call("fs::ls", json!({"sandbox_id": id, "path": "/data"})).await?;
        let names: Vec<_> = ls["entries"].as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["moved", "sub"]);
        Ok(())
    }

    /// Writes data to a file through a channel.
    async fn upload(&self, id: &Value, path: &str, data: &[u8]) -> Outcome<Value> {
        let channel = create_channel(&self.client, None).await?;
        let write = json!({"sandbox_id": id, "path": path, "content": channel.reader_ref});
        let send = async {
            // Connects, which a writer without bytes would not.
            channel.writer.send_message("begin").await?;
            channel.writer.write(data).await?;
            channel.writer.close().await
        };
        let (reply, sent) = tokio::join!(self.call("fs::write", write), send);
        sent?;
        Ok(reply?)
    }

    async fn transfers(&self, id: &Value) -> Outcome<()> {
        for size in [0, 1, (8 << 20) + 1] {
            let data: Vec<u8> = (0..size).map(|i| (i * 7 + i / 251) as u8).collect();
            assert_eq!(self.upload(id, "/data/big", &data).await?["bytes_written"], size);
            let reply = self.call("fs::read", json!({"sandbox_id": id, "path": "/data/big"})).await?;
            assert_eq!(reply["size"], size);
            let reader = from_value::<StreamChannelRef>(reply["content"].clone())?;
            let back = ChannelReader::new(&self.url, &reader).read_all().await?;
            assert!(back == data, "{size} bytes came back as {}", back.len());
        }
        Ok(())
    }

    async fn all(&self) -> Outcome<()> {
        let began = Instant::now();
        let done = |step| println!("{step}: {} ms since the beginning", began.elapsed().as_millis());
        let id = self.lifecycle().await?;
        done("lifecycle");
        self.programs(&id).await?;
        done("programs");
        self.files(&id).await?;
        done("files");
        self.transfers(&id).await?;
        done("transfers");
        assert_eq!(self.call("stop", json!({"sandbox_id": id, "wait": true})).await?["stopped"], true);
        self.refused("S002", "stop", json!({"sandbox_id": id})).await;
        let query = TriggerRequest {
            function_id: "engine::functions::list".into(),
            payload: json!({"worker": ADAPTER}),
            action: None,
            timeout_ms: None,
        };
        let list = self.client.trigger(query).await?;
        let functions = list["functions"].as_array().unwrap().iter();
        let all: BTreeSet<_> = functions.map(|f| f["function_id"].as_str().unwrap().to_string()).collect();
        assert_eq!((*self.called.lock().unwrap()).clone(), all);
        assert_eq!(all.len(), 17);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let url = var("III_URL")?;
    let otel = OtelConfig { enabled: Some(false), ..Default::default() };
    let client = register_worker(&url, InitOptions { otel: Some(otel), ..Default::default() });
    let caller = Caller { client, url, image: var("IMAGE")?, mark: var("MARK")?, called: Mutex::default() };
    let outcome = caller.all().await;
    caller.client.shutdown_async().await;
    outcome
}
