package app

import "strconv"

// foreignFile is a file of another tool, which dpserve knows and does not read.
type foreignFile struct {
	what    string
	keys    []string // that the file has at its top, all of them
	instead string   // what to write or type
}

const writeOwn = "write applications: [{name, model, engine, data_parallel}] as docs/app-yaml.md shows"

// foreignFiles are tried in their order.
//
//nolint:gochecknoglobals // a constant table
var foreignFiles = []foreignFile{
	{"a Kubernetes object", []string{"apiVersion", "kind"}, "dpserve runs under Kubernetes as any program; " +
		writeOwn},
	{"a Compose file", []string{"services"}, "write one application for the engines of the services, or " +
		"attach running ones: dpserve up --attach URL URL"},
	{"a LiteLLM configuration", []string{"model_list"}, "write one application for each model_name, with " +
		"its engines as engine: {kind: attach, ranks: [{url: …}]}"},
	{"an SGLang configuration", []string{"model-path"}, "type its keys as flags: dpserve serve --engine " +
		"sglang --model-path MODEL --dp-size N"},
	{"an SGLang configuration", []string{"model_path"}, "type its keys as flags: dpserve serve --engine " +
		"sglang --model-path MODEL --dp-size N"},
	{"a vLLM configuration", []string{"model", "tensor-parallel-size"}, "type its keys as flags: dpserve " +
		"serve MODEL --tensor-parallel-size N --data-parallel-size N"},
	{"a Dynamo service configuration", []string{"Frontend"}, "write one application with engine.kind vllm " +
		"or sglang and routing: {policy: kv}"},
}

// kinds of Kubernetes objects that describe what dpserve does.
//
//nolint:gochecknoglobals // a constant table
var foreignKinds = map[string]foreignFile{
	"DynamoGraphDeployment": {
		"a Dynamo graph", nil, "write one application for its workers, with routing: {policy: kv} for " +
			"router mode kv and prefill: and decode: for its two kinds of workers",
	},
	"RayService": {
		"a RayService of Kubernetes", nil, "save the text of spec.serveConfigV2 as a file: dpserve reads " +
			"that",
	},
}

// refuseForeign refuses a file of another tool with one fault, which replaces all others: its keys say
// nothing here.
func (d *decoder) refuseForeign(root *node) bool {
	for _, f := range foreignFiles {
		at, hasAll := place{}, root.get("applications") == nil
		for _, key := range f.keys {
			value := root.get(key)
			if hasAll = hasAll && value != nil; hasAll {
				at = value.place
			}
		}
		if !hasAll {
			continue
		}
		what := f.what
		if kind := root.get("kind"); kind != nil && len(f.keys) > 1 {
			if known, ok := foreignKinds[kind.text]; ok {
				f, what = known, known.what
			} else {
				what += " (kind " + strconv.Quote(kind.text) + ")"
			}
		}
		d.faults = nil
		d.fault(at, "", Fault{Message: "this is " + what + ", which dpserve does not read", Hint: f.instead})
		return true
	}
	return false
}
