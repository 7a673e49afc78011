package node

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// featurePeriod is between two looks at the files. Node feature discovery takes 60 s.
const featurePeriod = 500 * time.Millisecond

// Features stand in for node feature discovery: they make the lines that GPU feature discovery writes into files labels of
// the node. When a line is gone, its label is removed.
type Features struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// FollowFeatures publishes the files of the directory until Stop.
func FollowFeatures(ctx context.Context, client kubernetes.Interface, node, dir string, log *zap.Logger) *Features {
	ctx, cancel := context.WithCancel(ctx)
	f := &Features{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(f.done)
		period := time.NewTicker(featurePeriod)
		defer period.Stop()
		published := map[string]string{}
		for {
			if err := publish(ctx, client, node, dir, published); err != nil && ctx.Err() == nil {
				log.Warn("features not published", zap.Error(err))
			}
			select {
			case <-ctx.Done():
				return
			case <-period.C:
			}
		}
	}()
	return f
}

// Stop returns when nothing is published any more. Labels on the node stay.
func (f *Features) Stop() {
	f.cancel()
	<-f.done
}

// publish brings the node's labels from what was published to what the files say.
func publish(ctx context.Context, client kubernetes.Interface, node, dir string, published map[string]string) error {
	found, err := readFeatures(dir)
	if err != nil {
		return err
	}
	changes := map[string]*string{}
	for key, value := range found {
		if before, ok := published[key]; !ok || before != value {
			changes[key] = &value
		}
	}
	for key := range published {
		if _, ok := found[key]; !ok {
			changes[key] = nil
		}
	}
	if len(changes) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": changes}})
	if err != nil {
		return err
	}
	o := metav1.PatchOptions{FieldManager: "nfd-master"}
	if _, err := client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, patch, o); err != nil {
		return fmt.Errorf("labelling node %s: %w", node, err)
	}
	clear(published)
	maps.Copy(published, found)
	return nil
}

// readFeatures reads lines of the form key=value from the files of the directory, which need not exist.
func readFeatures(dir string) (map[string]string, error) {
	found := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	entries = slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return e.IsDir() || strings.HasPrefix(e.Name(), ".") })
	for _, e := range entries {
		file, err := os.Open(filepath.Join(dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		lines := bufio.NewScanner(file)
		for lines.Scan() {
			if key, value, ok := strings.Cut(lines.Text(), "="); ok {
				found[key] = value
			}
		}
		if err := errors.Join(lines.Err(), file.Close()); err != nil {
			return nil, err
		}
	}
	return found, nil
}
