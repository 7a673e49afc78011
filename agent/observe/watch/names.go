package watch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// onlyMetadata asks the API server for the metadata of a list's items. An API server that does not support that answers with whole objects.
const onlyMetadata = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

// names lists the selected objects by name. It is for API servers that do not begin a watch with the present objects (before Kubernetes 1.34, or
// without the feature WatchList). Decoding a whole list takes several times its length, and tenants decide how long it is. So names reads the answer
// object by object, and keeps only the names.
func names(ctx context.Context, client cache.Getter, resource, namespace string, o metav1.ListOptions) (*metav1.PartialObjectMetadataList, error) {
	body, err := client.Get().Namespace(namespace).Resource(resource).VersionedParams(&o, metav1.ParameterCodec).SetHeader("Accept", onlyMetadata).Stream(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }() // readNames has read it to its end, or has failed
	out, err := readNames(body)
	if err != nil {
		return nil, fmt.Errorf("reading the list of %s: %w", resource, err)
	}
	return out, nil
}

var errNotAList = errors.New("it is no list")

// named is what readNames keeps of an object.
type named struct {
	Metadata struct {
		Name            string    `json:"name"`
		Namespace       string    `json:"namespace"`
		UID             types.UID `json:"uid"`
		ResourceVersion string    `json:"resourceVersion"`
	} `json:"metadata"`
}

// readNames reads one object after the other from a list. It returns an error if the list's end is missing.
func readNames(body io.Reader) (*metav1.PartialObjectMetadataList, error) {
	d := json.NewDecoder(body)
	if err := opens(d, '{'); err != nil {
		return nil, err
	}
	out := &metav1.PartialObjectMetadataList{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, err
		}
		switch key {
		case "metadata":
			err = d.Decode(&out.ListMeta)
		case "items":
			out.Items, err = readItems(d)
		default:
			err = d.Decode(new(json.RawMessage))
		}
		if err != nil {
			return nil, fmt.Errorf("%v: %w", key, err)
		}
	}
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	return out, nil
}

func readItems(d *json.Decoder) ([]metav1.PartialObjectMetadata, error) {
	token, err := d.Token()
	switch {
	case err != nil:
		return nil, err
	case token == nil: // null, as an empty list may be written
		return nil, nil
	case token != json.Delim('['):
		return nil, errNotAList
	}
	var out []metav1.PartialObjectMetadata
	for d.More() {
		var item named
		if err := d.Decode(&item); err != nil {
			return nil, fmt.Errorf("the one after %d others: %w", len(out), err)
		}
		of := item.Metadata
		out = append(out, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Name: of.Name, Namespace: of.Namespace, UID: of.UID, ResourceVersion: of.ResourceVersion,
		}})
	}
	_, err = d.Token()
	return out, err
}

func opens(d *json.Decoder, with json.Delim) error {
	token, err := d.Token()
	if err == nil && token != with {
		err = errNotAList
	}
	return err
}
